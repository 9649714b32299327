"""The watch acts on silence: a frozen engine is given up within seconds, alone, and is back when it goes on."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tercet.fleet import EngineFleet, Trace, membership
from tercet.fleet.engine_fleet import Member
from tercet.fleet.membership import Membership
from tercet.protocol import Engine, EngineStatus, EngineUnreachable
from tests.longest_wait import LONGEST_WAIT_S
from tests.unit.fleet.test_calls_in_flight import REQUEST, Frozen, view_of


class Answering(Frozen):
    """Says how it is as long as it is not frozen, and what its core does."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.stalled_s = 0.0

    async def status(self) -> EngineStatus:
        await self.thawed.wait()
        return EngineStatus(
            engine=self.name, model="m", version="0", vllm_version="0", block_size=16, total_blocks=10, free_blocks=10,
            running=0, waiting=0, kv_cache_usage=0.0, max_model_len=100, leases=0, sends=0, stalled_s=self.stalled_s,
        )  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "POLL_INTERVAL_S", 0.02)
    monkeypatch.setattr(membership, "REPORTED_WITHIN", 0.02)
    monkeypatch.setattr(Membership, "_refuse", lambda *said: pytest.fail(str(said)))


def watched(*engines: Engine) -> tuple[EngineFleet, Membership]:
    fleet = EngineFleet([Member(e.name, "", "both", e) for e in engines], stuck_after_s=0.3)
    return fleet, Membership(fleet, lambda *_: pytest.fail("nobody joins"))


async def until(holds: object, *args: object) -> None:
    async with asyncio.timeout(LONGEST_WAIT_S):
        while not holds(*args):  # type: ignore[operator]
            await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["api server", "core"])
async def test_an_engine_that_stands_still_is_given_up_alone_and_comes_back(how: str) -> None:
    frozen, other = Answering("a"), Answering("b")
    fleet, looking = watched(frozen, other)
    running = asyncio.create_task(looking.watch())
    await until(lambda: fleet.health.heard_within("a", 1) and fleet.health.heard_within("b", 1))
    view = fleet.traced(Trace())
    with view.engine("a") as engine:
        asked = asyncio.create_task(engine.start_generate(REQUEST).run(lambda _: None))
        if how == "core":
            frozen.stalled_s = 60.0
        else:
            frozen.thawed.clear()
        with pytest.raises(EngineUnreachable, match="stuck"):
            await asked
    assert [member.reachable for member in fleet.members] == [False, True]
    with view.pick() as picked:
        assert picked.name == "b"
    frozen.stalled_s = 0.0
    frozen.thawed.set()
    await until(lambda: fleet.member("a").reachable)
    running.cancel()
    await asyncio.wait({running})


async def test_who_reports_is_not_asked() -> None:
    quiet = Frozen("a")
    fleet, looking = watched(quiet)
    running = asyncio.create_task(looking.watch())
    for _ in range(20):
        fleet.health.heard("a", 0.0)
        await asyncio.sleep(0.01)
    assert fleet.member("a").reachable
    running.cancel()
    await asyncio.wait({running})
    assert quiet.left <= 2


async def test_a_view_without_a_watch_loses_nobody() -> None:
    fleet = view_of(Answering("a")).fleet
    assert fleet.health.stand_still(0.5) == []


@pytest.mark.slow
async def test_restarts_of_an_engine_are_counted_and_the_first_start_is_none() -> None:
    class Restarted(Answering):
        incarnation = "one"

        async def status(self) -> EngineStatus:
            return msgspec.structs.replace(await super().status(), incarnation=self.incarnation)

    engine = Restarted("a")
    fleet, looking = watched(engine)
    running = asyncio.create_task(looking.watch())
    member = fleet.member("a")
    await until(lambda: member.incarnation == "one")
    first = member.since
    assert (member.restarts, first > 0) == (0, True)
    engine.incarnation = "two"
    await until(lambda: member.incarnation == "two")
    assert member.restarts == 1
    assert member.since >= first
    running.cancel()
    await asyncio.wait({running})
