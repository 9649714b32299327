"""The first uses of what loads libraries or compiles kernels when it is used first, before an engine serves.

That takes seconds, in the API server, the core or every worker, each of which stands still meanwhile, and a front door
could not tell it from an engine that is stuck. So a few requests of a token or two go all the way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tercet.protocol import TercetError
from tercet.vllm_plugin.engine import core_methods, loading_stages
from tercet.vllm_plugin.engine.connector_messages import TercetParams
from tercet.vllm_plugin.engine.core_methods import CoreCalls
from tercet.vllm_plugin.engine.llm_requests import LLMRequest

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)
FIRST_USE_SECONDS = 120.0
PROMPT = [0, 0]


class FirstUse(NamedTuple):
    """Requests with ``params``, ``at_once`` of them; ``what`` is slow the first time."""

    what: str
    at_once: int
    params: Mapping[str, Any]


GRAMMAR = FirstUse("structured output", 1, {"structured_outputs": {"regex": "a"}, "max_tokens": 1, "temperature": 0})
SAMPLING = (
    # vLLM compiles how it samples, and how it ranks log probabilities, when they are asked for.
    FirstUse("sampling", 1, {"temperature": 1.0, "max_tokens": 1, "logprobs": 1}),
    # What was compiled for one row is compiled again for several. The second token is sampled for both together.
    FirstUse("sampling of several", 2, {"temperature": 1.0, "max_tokens": 2, "ignore_eos": True}),
)


async def practise_first_uses(client: AsyncLLM, core: CoreCalls, token: str) -> None:
    """Have the engine, which bears ``token``, use for the first time what is slow then; returns when it has.

    One that cannot serves all else, and says so in its log. To be called before anybody else asks it for anything.
    """
    began = time.monotonic()
    loading_stages.begin(loading_stages.FIRST_REQUESTS)
    for use in SAMPLING:
        await _practise(use, client, token)
    if not client.vllm_config.model_config.skip_tokenizer_init:  # without a tokenizer there are no grammars
        try:
            await _practise(GRAMMAR, client, token)
        finally:
            await core.call(core_methods.forget_grammar_backend)
    logger.info("what is slow at its first use was used in %.1f s", time.monotonic() - began)


async def _practise(use: FirstUse, client: AsyncLLM, token: str) -> None:
    async def one() -> None:
        async for _ in LLMRequest(client, PROMPT, use.params, TercetParams(token), 0, None).outputs():
            pass

    try:
        async with asyncio.timeout(FIRST_USE_SECONDS), asyncio.TaskGroup() as group:
            for _ in range(use.at_once):
                group.create_task(one())
    except* (TercetError, TimeoutError) as failures:
        why = str(failures.exceptions[0]) or "no answer"
        logger.warning("the first use of %s will be slow: one for practice failed: %s", use.what, why)
