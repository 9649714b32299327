"""Disaggregation that skips the prefill engine when it would have little to compute."""

import math

from tercet.programs.answer import Answer
from tercet.programs.data_parallel import data_parallel
from tercet.programs.disaggregated import disaggregated
from tercet.protocol import Fleet, Request


async def cache_bypass(
    request: Request, fleet: Fleet, *, cached_share: float = 0.5, short_prompt: int = 128, pick: str = "least_loaded"
) -> Answer:
    """Serve on the decode engine alone if it has more than ``cached_share`` of the prompt, or if the prompt is short.

    Only tokens that the engine itself finds in its cache count. A prompt of up to ``short_prompt`` tokens is short.
    """
    if request.num_tokens <= short_prompt:
        yield data_parallel(request, fleet, pick=pick, role="decode")
        return
    least_missing = math.ceil(request.num_tokens * (1 - cached_share))
    yield disaggregated(request, fleet, min_send=max(1, least_missing), pick=pick)
