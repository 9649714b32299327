"""A request that takes too long is ended, wherever it is, and gives everything back."""

from __future__ import annotations

import asyncio
import time

import pytest

from tercet.fleet import Trace
from tercet.protocol import DeadlineExceeded, NoSpace, Request
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.service import Service

from .conftest import LiveRouter

ANSWER = ("disaggregated", [100, 101, 102])


def limited(router: LiveRouter, metrics: Metrics, seconds: float | None) -> LiveRouter:
    router.service = Service(router.fleet, "disaggregated", {}, metrics, request_timeout=seconds)
    return router


async def ask(router: LiveRouter, began: float | None = None) -> tuple[str, list[int]]:
    return await router.ask(began=began)


@pytest.mark.parametrize("stuck", ["p", "d"])
async def test_a_stuck_engine(router: LiveRouter, metrics: Metrics, stuck: str) -> None:
    limited(router, metrics, 0.05).engine(stuck).pause.clear()
    with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
        await ask(router)
    assert await router.has_everything_back()


async def test_no_cancellation_stays_behind(router: LiveRouter, metrics: Metrics) -> None:
    limited(router, metrics, 0.05).engine("d").pause.clear()
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(DeadlineExceeded):
        await router.service.run(Request(seq_id="s", prompt=(1, 2, 3)), Trace()).run(lambda _: None)
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # where it would come


async def test_retries_end_with_it(router: LiveRouter, metrics: Metrics) -> None:
    limited(router, metrics, 0.05)
    for name in "pd":
        router.engine(name).failures["start_generate"] = NoSpace("full")
    with pytest.raises(DeadlineExceeded):  # the second retry would begin after 0.2 s
        await ask(router)
    assert await router.has_everything_back()


async def test_a_request_that_comes_too_late_from_the_start(router: LiveRouter, metrics: Metrics) -> None:
    with pytest.raises(DeadlineExceeded):
        await ask(limited(router, metrics, 5.0), began=time.monotonic() - 6.0)
    assert await router.has_everything_back()


@pytest.mark.parametrize("seconds", [None, 60.0])
async def test_one_that_ends_in_time(router: LiveRouter, metrics: Metrics, seconds: float | None) -> None:
    assert await ask(limited(router, metrics, seconds)) == ANSWER


async def test_a_timeout_of_the_callers_own_stays_one(router: LiveRouter, metrics: Metrics) -> None:
    limited(router, metrics, 60.0).engine("d").pause.clear()

    async def ask_impatiently() -> None:
        async with asyncio.timeout(0.02):
            await router.ask()

    with pytest.raises(TimeoutError):
        await ask_impatiently()
    assert await router.has_everything_back()


async def test_a_background_request_has_none(router: LiveRouter, metrics: Metrics) -> None:
    engine = limited(router, metrics, 0.05).engine("d")
    engine.pause.clear()
    request = Request(seq_id="s", prompt=(1, 2, 3), sampling_params={"max_tokens": 2}, background=True)
    running = asyncio.ensure_future(router.service.run(request, Trace()).run(lambda _: None))
    await asyncio.sleep(0.15)
    assert not running.done()
    engine.pause.set()
    await running
