"""What no engine has reason to say, and a program passes on: it fails its own request, and not the router."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from tercet.protocol import Output, TokenLogprob, Usage
from tests.longest_wait import LONGEST_WAIT_S
from tests.unit.router.test_with_vllm import ANSWER, House, built, house, tokens_of

__all__ = ["built", "house"]
pytestmark = pytest.mark.asyncio(loop_scope="module")
GIVEN = ((TokenLogprob(5, -1.0, 1),),)
WRONG = {
    "logprobs": Output((5,), "length", logprobs=GIVEN),
    "too few logprobs": Output((5, 6), "length", logprobs=GIVEN),
    "empty logprobs": Output((5,), "length", logprobs=((),)),
    "logprobs of no tokens": Output((5,), "length", logprobs=((TokenLogprob(-1, float("nan"), 10**9),),)),
    "prompt logprobs": Output((5,), "length", prompt_logprobs=(None, *GIVEN)),
    "unknown token": Output((2**31 - 1,), "length"),
    "negative token": Output((-5,), "length"),
    "huge token": Output((2**70,), "length"),
    "negative usage": Output((5,), "length", usage=Usage(cached=-5, received=-7, computed=-3)),
    "huge usage": Output((5,), "length", usage=Usage(cached=10**6, received=10**6, computed=10**6)),
    "no token": Output((), "length"),
    "huge stop reason": Output((5,), "length", stop_reason=2**70),
    "too many tokens": Output(tuple(range(3000)), "length"),
}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("asked", [{}, {"logprobs": 1}], ids=["plain", "logprobs"])
@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_output_fails_its_own_request_alone(
    house: House, wrong: str, asked: dict[str, Any], stream: bool
) -> None:
    for engine in house.engines.values():
        engine.breaks_off = WRONG[wrong]
    try:
        async with asyncio.timeout(LONGEST_WAIT_S):
            with suppress(KeyError, IndexError):  # of vLLM's own handler of this request, for which it is a 500
                await house.complete(stream=stream, **asked)
    finally:
        for engine in house.engines.values():
            engine.breaks_off = None
    house.mend()
    async with asyncio.timeout(LONGEST_WAIT_S):
        assert tokens_of(await house.complete()) == ANSWER
