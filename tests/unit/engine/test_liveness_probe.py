"""What an engine's API server knows of the life of the engine's other processes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tercet.engine import liveness_probe
from tercet.engine.agents import ProbeCollector
from tercet.engine.liveness_probe import POLL_INTERVAL_S, LivenessProbe, StallClock
from tercet.protocol import EngineError
from tercet.transport import AsyncControlClient, ControlServer, ReadCounters
from tercet.transport.agent.agent_messages import Command
from tests.longest_wait import LONGEST_WAIT_S, until

# ---- since when a part stands still ----------------------------------------------------------------------------


def watched(clock: StallClock, begin: float, end: float) -> dict[str, float]:
    """What the clock says at ``end`` to somebody who has looked twice a second since ``begin``."""
    found: dict[str, float] = {}
    at = begin
    while at <= end:
        found = clock.stalled(at)
        at += 0.5
    return found


def test_who_owes_no_answer_does_not_stand_still() -> None:
    clock = StallClock()
    clock.asked("core", 10.0)
    clock.answered("core")
    assert watched(clock, 10.0, 100.0) == {}


def test_a_part_stands_still_since_it_was_asked() -> None:
    clock = StallClock()
    clock.asked("core", 10.0)
    clock.asked("agent", 12.0)
    assert watched(clock, 10.0, 17.0) == {"core": 7.0, "agent": 5.0}
    clock.answered("core")
    assert clock.stalled(17.5) == {"agent": 5.5}


def test_asking_again_forgives_nothing() -> None:
    clock = StallClock()
    clock.asked("core", 10.0)
    clock.asked("core", 14.0)
    assert watched(clock, 10.0, 15.0) == {"core": 5.0}


def test_a_step_is_progress_of_the_core_and_of_nobody_else() -> None:
    clock = StallClock()
    clock.asked("core", 10.0)
    clock.asked("agent", 10.0)
    clock.progressed("core", 13.0)
    clock.progressed("worker", 13.0)  # which owes nothing
    assert watched(clock, 10.0, 15.0) == {"core": 2.0, "agent": 5.0}


def test_time_in_which_nobody_looked_does_not_count() -> None:
    clock = StallClock()
    clock.asked("core", 10.0)
    assert watched(clock, 10.0, 12.0) == {"core": 2.0}
    assert clock.stalled(42.0) == {"core": 2.0}  # this process stood still for 30 s
    assert clock.stalled(42.0 + POLL_INTERVAL_S) == {"core": 2.0 + POLL_INTERVAL_S}


def test_who_was_asked_while_nobody_looked_is_not_ahead_of_time() -> None:
    clock = StallClock()
    assert clock.stalled(10.0) == {}
    clock.asked("core", 39.0)
    assert clock.stalled(40.0) == {"core": 0.0}


# ---- asking ------------------------------------------------------------------------------------------------------


class Part:
    """Something that is asked; it answers only while it is not ``frozen``."""

    def __init__(self, **answer: int) -> None:
        self.answer: dict[str, Any] = answer
        self.asked = self.outstanding = self.most_outstanding = 0
        self.error: Exception | None = None
        self._goes_on = asyncio.Event()
        self._goes_on.set()

    def freeze(self) -> None:
        self._goes_on.clear()

    def thaw(self) -> None:
        self._goes_on.set()

    async def ask(self) -> dict[str, Any]:
        self.asked += 1
        self.outstanding += 1
        self.most_outstanding = max(self.most_outstanding, self.outstanding)
        try:
            await self._goes_on.wait()
            if self.error is not None:
                raise self.error
            return dict(self.answer)
        finally:
            self.outstanding -= 1


class Probed:
    """An engine of one rank, and the probe of it."""

    def __init__(self) -> None:
        self.core, self.agent, self.worker = Part(leases=0), Part(bytes_sent=1), Part()
        self.probe = LivenessProbe(self.core.ask, [self.agent.ask], [self.worker.ask])

    async def stalled_for(self, seconds: float) -> float:
        await until(lambda: self.probe.stalled_s >= seconds)
        return self.probe.stalled_s

    async def goes_on(self) -> None:
        await until(lambda: not self.probe.stalled_s)


@asynccontextmanager
async def probed() -> AsyncGenerator[Probed]:
    found = Probed()
    await found.probe.start()
    try:
        yield found
    finally:
        await found.probe.close()
    assert found.core.outstanding == found.agent.outstanding == found.worker.outstanding == 0


@pytest.mark.parametrize("which", ["core", "agent", "worker"])
async def test_one_process_that_stands_still_is_noticed_and_forgotten_when_it_goes_on(which: str) -> None:
    async with probed() as engine:
        part: Part = getattr(engine, which)
        await engine.goes_on()
        part.freeze()
        stood = await engine.stalled_for(0.3)
        await engine.probe.news()
        assert engine.probe.stalled_s > stood
        part.thaw()
        await engine.goes_on()


async def test_steps_are_progress_of_a_core_that_does_not_answer() -> None:
    async with probed() as engine:
        engine.core.freeze()
        stood = await engine.stalled_for(0.3)
        engine.probe.core_progressed()
        assert engine.probe.stalled_s < stood


async def test_a_step_that_gets_from_layer_to_layer_is_progress_however_long_it_takes() -> None:
    async with probed() as engine:
        engine.core.freeze()
        for layers in range(3):
            stood = await engine.stalled_for(0.3)
            engine.worker.answer = {"layers": layers + 1}
            await engine.probe.news(0.2)
            assert engine.probe.stalled_s < stood
        await engine.stalled_for(0.7)  # and one that does not is none


async def test_who_asks_for_news_gets_what_was_so_after_asking() -> None:
    async with probed() as engine:
        for leases in range(1, 20):
            engine.core.answer = {"leases": leases}
            engine.agent.answer = {"bytes_sent": leases}
            await engine.probe.news(LONGEST_WAIT_S)
            assert engine.probe.core_status == {"leases": leases}
            assert engine.probe.agent_counters == [{"bytes_sent": leases}]


async def test_nobody_waits_long_for_a_core_that_stands_still_and_it_is_asked_once() -> None:
    async with probed() as engine:
        engine.core.freeze()
        await asyncio.wait_for(asyncio.gather(*(engine.probe.news() for _ in range(50))), LONGEST_WAIT_S)
        asked = engine.core.asked
        await asyncio.wait_for(asyncio.gather(*(engine.probe.news() for _ in range(50))), LONGEST_WAIT_S)
        assert engine.core.asked == asked
        assert engine.core.most_outstanding == 1
        assert engine.probe.core_status == {"leases": 0}  # as it was
        engine.core.thaw()
        await engine.goes_on()


async def test_many_who_want_news_at_once_ask_one_question() -> None:
    async with probed() as engine:
        before = engine.core.asked
        await asyncio.gather(*(engine.probe.news(LONGEST_WAIT_S) for _ in range(100)))
        assert engine.core.asked - before <= 2  # one may have been under way


async def test_an_error_is_an_answer_and_the_last_good_one_stays() -> None:
    async with probed() as engine:
        engine.agent.error = EngineError("no counters")
        await engine.probe.news(LONGEST_WAIT_S)
        await engine.goes_on()
        assert engine.probe.agent_counters == [{"bytes_sent": 1}]


async def test_a_core_that_cannot_be_asked_stands_still() -> None:
    async with probed() as engine:
        engine.core.error = RuntimeError("EngineCore has died")
        await engine.probe.news(LONGEST_WAIT_S)
        await engine.stalled_for(0.3)
        engine.core.error = None
        await engine.probe.news(LONGEST_WAIT_S)
        await engine.goes_on()


async def test_an_engine_of_which_a_part_never_answers_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness_probe, "FIRST_SECONDS", 0.1)
    engine = Probed()
    engine.worker.freeze()
    with pytest.raises(EngineError, match="the engine's worker of rank 0 did not answer"):
        await engine.probe.start()
    await engine.probe.close()


async def test_metrics_ask_nobody() -> None:
    registry = CollectorRegistry()
    async with probed() as engine:
        registry.register(ProbeCollector(engine.probe))
        for part in (engine.core, engine.agent, engine.worker):
            part.freeze()
        await engine.stalled_for(0.2)
        lines = generate_latest(registry).decode().splitlines()
        assert 'tercet_kv_bytes_sent_total{rank="0"} 1.0' in lines
        (stalled,) = [line for line in lines if line.startswith("tercet_stalled_seconds ")]
        assert float(stalled.split()[1]) >= 0.2
        for part in (engine.core, engine.agent, engine.worker):
            part.thaw()
        await engine.goes_on()


# ---- over the control channel --------------------------------------------------------------------------------


async def test_an_event_loop_asks_over_the_control_channel_and_is_not_held_up() -> None:
    goes_on = threading.Event()
    goes_on.set()

    def handle(_: Command) -> dict[str, int]:
        assert goes_on.wait(LONGEST_WAIT_S)
        return {"here": 1}

    server = ControlServer(handle)
    client = AsyncControlClient(server.address, server.secret)
    ask = partial(client.call, ReadCounters())
    probe = LivenessProbe(Part().ask, [ask], [])
    try:
        await probe.start()
        assert probe.agent_counters == [{"here": 1}]
        goes_on.clear()
        async with asyncio.timeout(LONGEST_WAIT_S):
            while probe.stalled_s < 0.2:
                before = time.monotonic()
                await asyncio.sleep(0)
                assert time.monotonic() - before < LONGEST_WAIT_S / 2
                await asyncio.sleep(0.01)
            goes_on.set()
            await until(lambda: not probe.stalled_s)
    finally:
        goes_on.set()
        await probe.close()
        client.close()
        server.close()


async def test_an_answer_that_says_what_went_wrong_is_raised() -> None:
    def handle(_: Command) -> None:
        raise EngineError("no")

    server = ControlServer(handle)
    client = AsyncControlClient(server.address, server.secret)
    try:
        with pytest.raises(EngineError, match=r"^no$"):
            await asyncio.wait_for(client.call(ReadCounters()), LONGEST_WAIT_S)
    finally:
        client.close()
        server.close()
