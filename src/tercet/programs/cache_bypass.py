"""Disaggregation that leaves the prefill engine out when it has little to do."""

import math
from collections.abc import AsyncIterator
from contextlib import aclosing

from tercet.fleet import Fleet
from tercet.programs.data_parallel import data_parallel
from tercet.programs.disaggregated import disaggregated
from tercet.protocol import Output, Request


async def cache_bypass(
    request: Request, fleet: Fleet, *, cached_share: float = 0.5, short_prompt: int = 128, pick: str = "least_loaded"
) -> AsyncIterator[Output]:
    """The decode engine alone, if it has more than ``cached_share`` of the prompt, or the prompt is short.

    What counts is what the engine itself finds in its cache. Short are prompts of up to ``short_prompt`` tokens.
    """
    if request.num_tokens <= short_prompt:
        outputs = data_parallel(request, fleet, pick=pick, role="decode")
    else:
        least_missing = math.ceil(request.num_tokens * (1 - cached_share))
        outputs = disaggregated(request, fleet, min_send=max(1, least_missing), pick=pick)
    async with aclosing(outputs):
        async for output in outputs:
            yield output
