"""The first structured output of an engine, before it serves: the first one loads libraries and kernels for seconds.

It does so in the API server, in the core and in every worker, each of which stands still meanwhile, and a front door
could not tell that from an engine that is stuck. So one request with a grammar of one letter goes all the way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from tercet.protocol import TercetError
from tercet.vllm_plugin.engine import core_methods
from tercet.vllm_plugin.engine.connector_messages import TercetParams
from tercet.vllm_plugin.engine.core_methods import CoreCalls
from tercet.vllm_plugin.engine.llm_requests import LLMRequest

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)
WARM_UP_SECONDS = 120.0
PROMPT = [0]
ONE_LETTER = {"structured_outputs": {"regex": "a"}, "max_tokens": 1, "temperature": 0}


async def warm_up_grammars(client: AsyncLLM, core: CoreCalls, token: str) -> None:
    """Have the engine, which bears ``token``, generate one token by a grammar; returns when it has.

    One that cannot serves all else, and says so in its log. To be called before anybody else asks it for anything.
    """
    if client.vllm_config.model_config.skip_tokenizer_init:
        return  # without a tokenizer there are no grammars
    began = time.monotonic()
    request = LLMRequest(client, PROMPT, ONE_LETTER, TercetParams(token), 0, None)
    try:
        async with asyncio.timeout(WARM_UP_SECONDS):
            async for _ in request.outputs():
                pass
    except (TercetError, TimeoutError) as error:
        why = str(error) or "no answer"
        logger.warning("the first structured output will be slow: one for practice failed: %s", why)
    finally:
        await core.call(core_methods.forget_grammar_backend)
    logger.info("structured output was tried in %.1f s", time.monotonic() - began)
