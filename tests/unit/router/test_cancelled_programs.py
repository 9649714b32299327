"""Cancellation and programs: one that is asked for ends everything, whatever the program does, and no other leaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tercet.fleet import Trace
from tercet.programs import Answer
from tercet.protocol import Fleet, Output, OutputStream, Request
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.routing import Chosen
from tercet.router.serve.service import NO_VERSION, Service

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
