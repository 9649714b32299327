"""Errors of vLLM's that end a request on an engine: those of the request are its client's, others are the engine's."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import exceptions
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector

from tercet.engine.interface import KeyedPrompt
from tercet.protocol import BadRequest, EngineError, TercetError
from tercet.vllm_plugin.core.connector_messages import TercetParams
from tercet.vllm_plugin.edge.llm_requests import LLMRequest

# vLLM 0.31 has no class for it.
PAUSED: Exception = getattr(exceptions, "RetryableRequestError", GenerationError)(
    "Generation is paused. Please retry after it resumes."
)
ERRORS = [
    (PAUSED, EngineError),
    (GenerationError(), EngineError),
    (VLLMValidationError("Invalid structured outputs"), BadRequest),
]


class Refusing:
    """A client of vLLM's whose engine ends each request with an error."""

    def __init__(self, error: Exception, queue: RequestOutputCollector | None = None) -> None:
        self._error, self._queue = error, queue

    async def add_request(self, request_id: str, *_: Any, **__: Any) -> RequestOutputCollector:
        assert self._queue is not None
        return self._queue

    async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        raise self._error
        yield


def request_to(client: Any) -> LLMRequest:
    return LLMRequest(client, KeyedPrompt([1, 2, 3]), {"max_tokens": 4}, TercetParams("token"))


@pytest.mark.parametrize(("error", "expected"), ERRORS)
@pytest.mark.parametrize("early", [False, True])
async def test_what_ends_a_decoding_request(error: Exception, expected: type[TercetError], early: bool) -> None:
    queue: Any = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    taken: list[Any] = []
    if early:  # while the request is being submitted
        queue.put(error)
    await request_to(Refusing(error, queue)).start(taken.append)
    if not early:
        queue.put(error)
    (found,) = taken
    assert type(found) is expected
    assert str(error) in found.message


@pytest.mark.parametrize(("error", "expected"), ERRORS)
async def test_what_ends_a_prompt(error: Exception, expected: type[TercetError]) -> None:
    with pytest.raises(expected, match=str(error)):
        await request_to(Refusing(error)).first()


async def test_an_end_without_a_token_is_the_engines() -> None:
    class Ending(Refusing):
        async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[Any, None]:
            choice = SimpleNamespace(
                token_ids=(), finish_reason="error", stop_reason=None, logprobs=None, prompt_logprobs=None
            )
            yield SimpleNamespace(num_cached_tokens=0, outputs=[choice], prompt_logprobs=None)

    with pytest.raises(EngineError, match="error"):
        await request_to(Ending(PAUSED)).first()
