"""Cancellation and programs: one that is asked for ends everything, whatever the program does, and no other leaks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from tercet.fleet import Trace
from tercet.programs import Answer
from tercet.protocol import DeadlineExceeded, Fleet, NoSpace, Output, OutputStream, Request
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.service import NO_VERSION, Chosen, Service

from .conftest import LiveRouter, counted

REQUEST = Request(seq_id="s", prompt=tuple(range(100)))


class TextEnded(Exception):
    """The consumer wants no more."""


def stream_of(
    router: LiveRouter, program: Callable[[Request, Fleet], Answer], monkeypatch: pytest.MonkeyPatch
) -> OutputStream:
    monkeypatch.setattr(Service, "_choose", lambda *_: Chosen(NO_VERSION, "mine", program))
    return router.service.run(REQUEST, Trace())


async def returns(request: Request, fleet: Fleet) -> Answer:
    with fleet.pick("decode") as engine:
        try:
            yield engine.start_generate(request)
        except asyncio.CancelledError:
            return


async def returns_from_its_own_wait(request: Request, fleet: Fleet) -> Answer:
    with fleet.pick("decode") as engine:
        try:
            async for output in engine.start_generate(request):
                yield output
        except asyncio.CancelledError:
            return


@pytest.mark.parametrize("program", [returns, returns_from_its_own_wait])
async def test_a_program_that_ends_when_its_client_left_is_not_tried_again(
    router: LiveRouter, monkeypatch: pytest.MonkeyPatch, program: Callable[[Request, Fleet], Answer]
) -> None:
    router.engine("d").pause.clear()
    running = asyncio.create_task(stream_of(router, program, monkeypatch).run(lambda _: None))
    while not router.engine("d").running:
        await asyncio.sleep(0)
    calls = len(router.engine("d").calls)
    running.cancel()
    await asyncio.wait([running])
    router.engine("d").pause.set()
    assert running.cancelled()
    assert counted("tercet_program_failures_total", program="mine") == 0
    assert (len(router.engine("d").calls), len(router.service.sequences)) == (calls, 0)
    assert await router.has_everything_back()


async def test_a_cancellation_that_nobody_asked_for_is_the_programs_fault(
    router: LiveRouter, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def program(_request: Request, _fleet: Fleet) -> Answer:
        child = asyncio.create_task(asyncio.sleep(60))
        child.cancel()
        await child
        yield Output(())

    outputs = list[Output]()
    await stream_of(router, program, monkeypatch).run(outputs.append)
    assert [token for output in outputs for token in output.token_ids] == [100, 101, 102]
    assert counted("tercet_program_failures_total", program="mine") == 1


async def test_where_a_consumer_leaves_no_cancellation_stays_behind(
    router: LiveRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def program(_request: Request, _fleet: Fleet) -> Answer:
        try:
            yield Output((1,))
        finally:
            raise ValueError("a clean-up that fails")

    def leave(_: Output) -> None:
        raise TextEnded

    async def nothing() -> None: ...

    with pytest.raises(TextEnded):
        await stream_of(router, program, monkeypatch).run(leave, nothing)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # where it would come


# A request that takes too long is ended, wherever it is, and gives everything back.

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
