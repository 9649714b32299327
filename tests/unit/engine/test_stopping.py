"""When an engine that has been told to stop does so."""

from __future__ import annotations

import asyncio

import pytest

from tercet.engine import edge
from tercet.engine.edge import StopWhenEmpty


class Engine:
    """With ``routers`` routers; ``happened`` is what it was told to do, in order."""

    def __init__(self, routers: int, is_empty: bool, grace: float = 1000.0) -> None:
        self.routers, self.is_empty = routers, is_empty
        self.happened: list[str] = []
        self.stopped = asyncio.Event()
        self.stop = StopWhenEmpty(self._announce, lambda: self.is_empty, self._stop, grace)

    def _announce(self) -> int:
        self.happened.append("announced")
        return self.routers

    def _stop(self) -> None:
        self.happened.append("stopped")
        self.stopped.set()

    async def until_stopped(self) -> None:
        await asyncio.wait_for(self.stopped.wait(), 60)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "HEARD_SECONDS", 0.02)
    monkeypatch.setattr(edge, "POLL_INTERVAL_S", 0.001)


async def test_with_nobody_there_and_nothing_running_it_stops_at_once() -> None:
    engine = Engine(routers=0, is_empty=True)
    engine.stop.ask()
    await asyncio.sleep(0)  # one turn of the loop
    assert engine.happened == ["announced", "stopped"]


async def test_routers_hear_of_it_before_an_empty_engine_stops() -> None:
    engine = Engine(routers=1, is_empty=True)
    engine.stop.ask()
    await asyncio.sleep(0)
    assert engine.happened == ["announced"]
    engine.is_empty = False  # what was on its way here when they heard it
    await asyncio.sleep(0.1)
    assert engine.happened == ["announced"]
    engine.is_empty = True
    await engine.until_stopped()


async def test_it_waits_until_it_is_empty() -> None:
    engine = Engine(routers=0, is_empty=False)
    engine.stop.ask()
    await asyncio.sleep(0.1)
    assert not engine.stopped.is_set()
    engine.is_empty = True
    await engine.until_stopped()
    assert engine.happened == ["announced", "stopped"]


async def test_it_waits_no_longer_than_its_grace() -> None:
    engine = Engine(routers=1, is_empty=False, grace=0.1)
    engine.stop.ask()
    await engine.until_stopped()


async def test_asked_again_it_stops_at_once() -> None:
    engine = Engine(routers=1, is_empty=False)
    engine.stop.ask()
    await asyncio.sleep(0.05)
    engine.stop.ask()
    assert engine.happened == ["announced", "stopped"]
    engine.is_empty = True
    await asyncio.sleep(0.05)
    assert engine.happened == ["announced", "stopped"], "once is enough"


async def test_without_a_grace_it_stops_at_once() -> None:
    engine = Engine(routers=1, is_empty=False, grace=0)
    engine.stop.ask()
    assert engine.happened == ["stopped"]
