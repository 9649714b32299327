"""One rescheduler for several routers: it proposes within limits, and looks at what engines say afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tercet.fleet import EngineFleet, Member
from tercet.protocol import BadRequest, EngineLoad, EngineUnreachable, SequenceReport, TercetError, UnknownSequence
from tercet.router.serve.rescheduler import ReportedSequences, Rescheduler
from tercet.settings import MoveSettings, RescheduleSettings
from tests.unit.fakes import FakeEngine

DOOR = "127.0.0.1:7000"


def report(
    seq_id: str, tokens: int = 100, age: float = 10.0, running: bool = True, router: str = DOOR
) -> SequenceReport:
    return SequenceReport(seq_id, tokens, tokens // 16, running, age, router)


@dataclass
class Reporting:
    """An engine that says what it is told to say, and notes what is proposed."""

    runs: list[SequenceReport] = field(default_factory=list[SequenceReport])
    proposed: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    failure: TercetError | None = None
    silent: bool = False

    async def sequences(self) -> list[SequenceReport]:
        if self.silent:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure
        return list(self.runs)

    async def propose_move(self, seq_id: str, destination: str, reason: str) -> None:
        if all(each.seq_id != seq_id for each in self.runs):
            raise UnknownSequence(f"seq_id: {seq_id}")
        self.proposed.append((seq_id, destination, reason))


class World:
    """Two decode engines, one of them busy."""

    def __init__(self, policies: Iterable[str] = ("decode_load",), **moves: Any) -> None:
        self.now = 100.0
        self.engines = {"busy": Reporting([report("a"), report("b", 200), report("c", 300)]), "idle": Reporting()}
        members = [Member(name, "", "decode", FakeEngine(name), kv_tokens=1000) for name in self.engines]
        self.fleet = EngineFleet(members, clock=lambda: self.now)
        reschedule = RescheduleSettings(policies=tuple(policies), threshold=0.1, order="SR", value=3)
        self.source = ReportedSequences(self.fleet, self.engines, MoveSettings(**moves), reschedule.stale_after_s)
        self.rescheduler = Rescheduler(self.fleet, self.source, reschedule)
        self.load(busy=0.6, idle=0.0)

    def load(self, **usage: float) -> None:
        for name, each in usage.items():
            self.fleet.report(name, EngineLoad(waiting=0, running=1, kv_usage=each))

    async def look(self) -> None:
        await self.rescheduler.look()
        for _ in range(5):
            await asyncio.sleep(0)

    @property
    def proposed(self) -> list[str]:
        return [seq_id for seq_id, *_ in self.engines["busy"].proposed]


async def test_what_policies_want_is_proposed_where_the_sequence_runs() -> None:
    world = World()
    await world.look()
    assert world.engines["busy"].proposed == [("a", "idle", "decode_load"), ("b", "idle", "decode_load")]
    assert len(world.source.under_way) == 2
    await world.look()
    assert len(world.proposed) == 2, "what is on its way counts as there"
    busy = world.engines["busy"]
    world.engines["idle"].runs, busy.runs = busy.runs[:2], busy.runs[2:]
    await world.look()
    assert len(world.source.under_way) == 0


async def test_limits_hold_for_all_that_is_proposed() -> None:
    world = World(per_engine=1)
    for _ in range(3):
        await world.look()
    assert world.proposed == ["a"]
    world.engines["busy"].runs.pop(0)
    await world.look()
    await world.look()
    assert world.proposed == ["a", "b"]


@pytest.mark.parametrize(
    "not_to_be_moved",
    [report("a", age=1.0), report("a", router="")],
    ids=["it has just come", "nobody owns it by a stream"],
)
async def test_what_is_left_alone(not_to_be_moved: SequenceReport) -> None:
    world = World()
    world.engines["busy"].runs = [not_to_be_moved]
    await world.look()
    assert world.proposed == []


async def test_an_engine_that_says_nothing_or_has_gone_stops_no_other() -> None:
    world = World()
    world.engines["third"] = Reporting(failure=EngineUnreachable("gone"))
    world.fleet.add(Member("third", "", "decode", FakeEngine("third"), kv_tokens=1000))
    await world.look()
    assert world.proposed == ["a", "b"]


async def test_a_sequence_that_has_ended_meanwhile() -> None:
    world = World()
    busy, said = world.engines["busy"], world.engines["busy"].sequences

    async def and_then_it_ends() -> list[SequenceReport]:
        found = await said()
        busy.runs.clear()
        return found

    busy.sequences = and_then_it_ends  # type: ignore[method-assign]
    await world.look()
    assert (world.proposed, len(world.source.under_way)) == ([], 0)


async def test_its_end_leaves_nothing_behind() -> None:
    world = World()
    running = asyncio.create_task(world.rescheduler.run())
    while len(world.proposed) < 2:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running})
    assert len(world.source.under_way) == 0


def test_a_policy_that_there_is_not_is_said_at_once() -> None:
    with pytest.raises(BadRequest, match="there is no policy 'x'"):
        World(policies=["x"])
