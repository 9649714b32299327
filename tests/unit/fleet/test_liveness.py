"""Who stands still, by what engines say and by their silence."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.fleet import EngineFleet, FleetView, Trace, membership
from tercet.fleet.engine_health import Liveness, Stuck
from tercet.fleet.members import Member
from tercet.fleet.membership import Membership
from tercet.protocol import Engine, EngineStatus, EngineUnreachable
from tests.longest_wait import until
from tests.unit.fleet.test_calls_in_flight import REQUEST, Frozen, view_of

EVERY = 0.5


def looked(liveness: Liveness, begin: float, end: float, *engines: str, stalled: float | None = None) -> list[Stuck]:
    """Look from ``begin`` to ``end``; the engines report before each look, as stalled since ``begin`` or not at all."""
    found: list[Stuck] = []
    now = begin
    while now < end:
        for engine in engines:
            liveness.heard(engine, now, 0.0 if stalled is None else now - begin + stalled)
        found += liveness.look(now, EVERY)
        now += EVERY
    return found


def test_who_reports_progress_is_never_stuck() -> None:
    assert looked(Liveness(5), 0, 600, "a", "b") == []


def test_silence_is_noticed_once_and_of_the_silent_one_alone() -> None:
    liveness = Liveness(5)
    looked(liveness, 0, 10, "a", "b")
    (stuck,) = looked(liveness, 10, 60, "b")
    assert stuck.engine == "a"
    assert "has sent no message" in stuck.why
    assert liveness.is_stuck("a")
    assert not liveness.is_stuck("b")


def test_a_loop_that_is_stuck_behind_a_healthy_server() -> None:
    liveness = Liveness(5)
    looked(liveness, 0, 10, "a")
    (stuck,) = looked(liveness, 10, 60, "a", stalled=0.0)
    assert "no progress" in stuck.why
    liveness.heard("a", 60, 2.0)
    assert not liveness.is_stuck("a")
    assert looked(liveness, 60, 70, "a") == []


def test_it_is_found_again_when_it_stops_again() -> None:
    liveness = Liveness(5)
    looked(liveness, 0, 10, "a")
    assert len(looked(liveness, 10, 20)) == 1
    looked(liveness, 20, 30, "a")
    assert len(looked(liveness, 30, 40)) == 1


def test_time_in_which_nobody_looked_is_not_held_against_engines() -> None:
    liveness = Liveness(5)
    looked(liveness, 0, 10, "a")
    assert liveness.look(100, EVERY) == []  # this process was stopped; what engines said is still in its sockets
    assert liveness.look(100.5, EVERY) == []
    assert [stuck.engine for stuck in looked(liveness, 101, 110)] == ["a"]


def test_whether_it_has_done_anything_since() -> None:
    liveness = Liveness(5)
    liveness.heard("a", 10.0)
    liveness.heard("a", 12.0, stalled_s=1.5)
    assert liveness.progressed_since("a", 10.5)
    assert not liveness.progressed_since("a", 11.0)
    assert liveness.progressed_since("unheard of", 11.0)


def test_a_member_that_went_is_forgotten() -> None:
    liveness = Liveness(5)
    liveness.heard("a", 0)
    liveness.look(0, EVERY)
    liveness.forget("a")
    assert looked(liveness, 0.5, 60) == []


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0, 20)), max_size=30), st.floats(0.1, 10))
def test_stuck_means_no_sign_of_progress_for_that_long(reports: list[tuple[float, float]], after: float) -> None:
    liveness, now, latest = Liveness(after), 0.0, 0.0
    liveness.heard("a", now)
    liveness.look(now, EVERY)
    for pause, stalled in reports:
        steps = int(pause / EVERY)
        for _ in range(steps):
            now += EVERY
            for stuck in liveness.look(now, EVERY):
                assert stuck.engine == "a"
                assert now - latest > after
        liveness.heard("a", now, stalled)
        latest = max(latest, now - stalled)
        assert not (liveness.is_stuck("a") and now - latest <= after)


def test_who_has_hung_up_is_not_heard_before_it_says_something_again() -> None:
    liveness = Liveness(5)
    liveness.heard("a", 10.0)
    assert liveness.heard_within("a", 1.0, 10.5)
    liveness.hung_up("a")
    assert not liveness.heard_within("a", 1.0, 10.5)
    assert liveness.look(10.5, EVERY) == [], "it is no proof that it stands still"
    liveness.heard("a", 10.6)
    assert liveness.heard_within("a", 1.0, 10.7)


# The watch acts on silence: a frozen engine is given up within seconds, alone, and is back when it goes on.


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


@pytest.mark.slow
@pytest.mark.parametrize("how", ["api server", "core"])
async def test_an_engine_that_stands_still_is_given_up_alone_and_comes_back(how: str) -> None:
    frozen, other = Answering("a"), Answering("b")
    fleet, looking = watched(frozen, other)
    running = asyncio.create_task(looking.watch())
    await until(lambda: fleet.health.heard_within("a", 1) and fleet.health.heard_within("b", 1))
    view = FleetView(fleet, Trace())
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
