"""First uses, before an engine serves, of code that loads libraries or compiles kernels when it is first used.

A first use takes seconds, in which the API server, the core or every worker is blocked, and a router could not
distinguish that from a stuck engine. So a few requests of one or two tokens run at the start.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tercet.engine.interface import KeyedPrompt
from tercet.protocol import TercetError
from tercet.vllm_plugin.core import core_methods
from tercet.vllm_plugin.core.connector_messages import TercetParams
from tercet.vllm_plugin.core.core_methods import CoreCalls
from tercet.vllm_plugin.edge.llm_requests import LLMRequest
from tercet.vllm_plugin.start import loading_stages

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)
FIRST_USE_SECONDS = 120.0
PROMPT = [0, 0]


class FirstUse(NamedTuple):
    """Requests with ``params``, ``at_once`` of them at a time; ``what`` names the code that is slow the first time."""

    what: str
    at_once: int
    params: Mapping[str, Any]


GRAMMAR = FirstUse("structured output", 1, {"structured_outputs": {"regex": "a"}, "max_tokens": 1, "temperature": 0})
SAMPLING = (
    # vLLM compiles sampling, and the ranking of log probabilities, at their first use.
    FirstUse("sampling", 1, {"temperature": 1.0, "max_tokens": 1, "logprobs": 1}),
    # Code that was compiled for one row is compiled again for several. The second token is sampled for both together.
    FirstUse("sampling of several", 2, {"temperature": 1.0, "max_tokens": 2, "ignore_eos": True}),
)


async def practise_first_uses(client: AsyncLLM, core: CoreCalls, token: str) -> None:
    """Run the first uses on the engine with this ``token``; return when they have ended.

    A failure is logged, and the engine serves all other requests. Call this before any other request is accepted.
    """
    began = time.monotonic()
    loading_stages.begin(loading_stages.FIRST_REQUESTS)
    for use in SAMPLING:
        await _practise(use, client, token)
    if not client.vllm_config.model_config.skip_tokenizer_init:  # grammars need a tokenizer
        try:
            await _practise(GRAMMAR, client, token)
        finally:
            await core.call(core_methods.forget_grammar_backend)
    logger.info("ran the slow first uses in %.1f s", time.monotonic() - began)


async def _practise(use: FirstUse, client: AsyncLLM, token: str) -> None:
    async def one() -> None:
        async for _ in LLMRequest(client, KeyedPrompt(PROMPT), use.params, TercetParams(token)).outputs():
            pass

    try:
        async with asyncio.timeout(FIRST_USE_SECONDS), asyncio.TaskGroup() as group:
            for _ in range(use.at_once):
                group.create_task(one())
    except* (TercetError, TimeoutError) as failures:
        why = str(failures.exceptions[0]) or "no answer"
        logger.warning("the first use of %s will be slow: a practice request failed: %s", use.what, why)
