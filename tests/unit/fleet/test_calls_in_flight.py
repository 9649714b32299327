"""Calls that wait for an engine end when it is lost, wherever they are, and leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from tercet.fleet import EngineFleet, FleetView, Trace
from tercet.fleet.members import CallsInFlight, Member, UntilLost
from tercet.protocol import (
    Engine,
    EngineStatus,
    EngineUnreachable,
    KVAddrInfo,
    KVLayout,
    Output,
    OutputStream,
    Request,
    Reservation,
    Sent,
)

LAYOUT = KVLayout("m", "float32", 1, 1, 8, 16, 1024, 1, "cpu")
REQUEST = Request(seq_id="s", prompt=(1, 2, 3))


class Frozen:
    """An engine that was stopped: it takes every call and answers none. Counts what has ended on its caller's side."""

    def __init__(self, name: str, outputs: int = 0) -> None:
        self.name = name
        self.outputs = outputs
        self.left = 0

    async def _for_ever(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.left += 1

    def prep_recv(self, request: Request, end: int | None = None) -> AbstractAsyncContextManager[Reservation]:
        return self._prep_recv()

    @asynccontextmanager
    async def _prep_recv(self) -> AsyncGenerator[Reservation]:
        await self._for_ever()
        yield reservation(self.name)

    async def extend_recv(self, reservation: Reservation, request: Request, end: int | None = None) -> Reservation:
        await self._for_ever()
        raise AssertionError

    async def remote_send(
        self, request: Request, to: Reservation, begin: int, end: int | None = None, sample: bool = False,
        cached_only: bool = False,
    ) -> Sent:  # fmt: skip
        await self._for_ever()
        raise AssertionError

    def start_generate(self, request: Request, begin: int = 0, output: Sequence[int] = ()) -> OutputStream:
        async def produce(stream: OutputStream) -> None:
            for token in range(self.outputs):
                stream.put(Output((token,)))
            await self._for_ever()

        return OutputStream(produce)

    async def status(self) -> EngineStatus:
        await self._for_ever()
        raise AssertionError


def reservation(name: str) -> Reservation:
    return Reservation(KVAddrInfo("lease", name, 0, 3, "tcp", (), LAYOUT), 0)


def view_of(*engines: Engine) -> FleetView:
    return FleetView(EngineFleet([Member(engine.name, "", "both", engine) for engine in engines]), Trace())


async def generated(engine: Engine, found: list[Output]) -> None:
    await engine.start_generate(REQUEST).run(found.append)


async def iterated(engine: Engine, found: list[Output]) -> None:
    found.extend([output async for output in engine.start_generate(REQUEST)])


async def reserved(engine: Engine) -> None:
    async with engine.prep_recv(REQUEST):
        raise AssertionError


@pytest.mark.parametrize("verb", ["prep_recv", "run", "iterate"])
async def test_a_call_to_a_lost_engine_fails_at_once(verb: str) -> None:
    frozen, other = Frozen("a", outputs=2), Frozen("b")
    view, found = view_of(frozen, other), list[Output]()
    fleet = view.fleet
    with view.engine("a") as engine:
        calls = {"prep_recv": reserved(engine), "run": generated(engine, found), "iterate": iterated(engine, found)}
        task = asyncio.create_task(calls.pop(verb))
        for unused in calls.values():
            unused.close()
        for _ in range(5):
            await asyncio.sleep(0)
        fleet.health.lose("b", "not this one")
        assert not task.done()
        fleet.health.lose("a", "nothing was heard of it")
        with pytest.raises(EngineUnreachable, match="a is stuck"):
            await task
    assert frozen.left == 1
    assert len(found) == (2 if verb == "run" else 0)
    assert not len(fleet.member("a").calls)
    assert not fleet.member("a").reachable
    assert not view.offers("decode")


async def test_a_push_that_the_receiver_does_not_take_is_not_its_senders_failure() -> None:
    sender, receiver = Frozen("sender"), Frozen("receiver")
    view = view_of(sender, receiver)
    fleet = view.fleet
    with view.engine("sender") as engine:
        task = asyncio.create_task(engine.remote_send(REQUEST, reservation("receiver"), 0))
        await asyncio.sleep(0)
        fleet.health.lose("receiver", "it answers, but has made no progress")
        with pytest.raises(EngineUnreachable, match="receiver is stuck"):
            await task
    assert fleet.member("sender").reachable
    assert not fleet.member("receiver").reachable
    with view.pick() as picked:
        assert picked.name == "sender"
    assert not len(fleet.member("sender").calls)
    assert not len(fleet.member("receiver").calls)


async def test_a_cancelled_call_is_cancelled_and_not_failed() -> None:
    calls = CallsInFlight()

    async def wait() -> None:
        async with UntilLost(calls):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not len(calls)


async def test_somebody_elses_timeout_is_not_the_engines() -> None:
    calls = CallsInFlight()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0), UntilLost(calls):
            await asyncio.Event().wait()
    with pytest.raises(TimeoutError):
        async with UntilLost(calls):
            raise TimeoutError
    assert not len(calls)


async def test_a_loss_after_the_call_concerns_nobody() -> None:
    calls = CallsInFlight()
    async with UntilLost(calls):
        pass
    calls.lose(EngineUnreachable("too late"))
    await asyncio.sleep(0)
