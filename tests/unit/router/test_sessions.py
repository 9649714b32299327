"""Sessions over simulated engines in virtual time: turns stay together through drains, losses and pauses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from tercet.fleet import EngineFleet, FleetView, Member, Trace
from tercet.protocol import EngineLoad, Request
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.service import Service
from tercet.router.serve.sessions import Sessions
from tercet.settings.fleet_settings import SessionSettings
from tercet_lab.bench.simulated.moving_fleet import SessionCounts
from tercet_lab.sim import SimEngine
from tests.longest_wait import until
from tests.unit.fakes import FakeEngine
from tests.unit.lab.sim.models import BLOCK, engines_of, is_empty, profile_of
from tests.virtual_time import in_virtual_time

TURN = 320
ANSWER = 17


class World:
    """A router over engines ``a``, ``b`` and so on; ``turn`` is a client's next request of a session."""

    def __init__(self, metrics: Metrics, engines: list[SimEngine], program: str, **settings: object) -> None:
        members = [Member(each.name, f"sim://{each.name}", "both", each, kv_tokens=16_000) for each in engines]
        self.engines = {engine.name: engine for engine in engines}
        self.fleet = EngineFleet(members, clock=asyncio.get_running_loop().time)
        self.service = Service(self.fleet, program, {}, metrics)
        self.counts = SessionCounts()
        wanted = msgspec.convert({"sessions": "on", **settings}, SessionSettings)
        self.service.sessions = self.sessions = Sessions(self.fleet, wanted, self.counts, "test")
        self.said: dict[str, tuple[int, ...]] = {}

    async def turn(
        self, session: str, *, calls_tool: bool = False, headers: Mapping[str, str] | None = None
    ) -> tuple[str, int]:
        """The engine that served it, and how many tokens it found in its cache."""
        number = len(self.said.get(session, ()))
        first = sum(map(ord, session)) * 10_000
        prompt = (*self.said.get(session, ()), *range(first + number, first + number + TURN))
        request = Request(
            seq_id=f"{session}-{number}", prompt=prompt, sampling_params={"max_tokens": ANSWER},
            headers={"x-dynamo-session-id": session, **(headers or {})},
        )  # fmt: skip
        trace = Trace()
        tokens = [token async for output in self.service.run(request, trace) for token in output.token_ids]
        assert len(tokens) == ANSWER
        self.said[session] = (*prompt, *tokens)
        self.sessions.answered(request, calls_tool=calls_tool)
        (generated,) = [event for event in trace.events if event.verb == "start_generate"]
        return generated.engine, generated.cached

    def whole_blocks(self, session: str) -> int:
        """Tokens of the session whose KV can be found again."""
        return (len(self.said[session]) - 1) // BLOCK * BLOCK


@asynccontextmanager
async def world(
    metrics: Metrics, names: str = "abc", program: str = "data_parallel", **settings: object
) -> AsyncGenerator[World]:
    """While entered, sessions are followed; afterwards every engine has everything back."""
    made = World(metrics, engines_of(*names), program, **settings)
    following = asyncio.create_task(made.sessions.run())
    try:
        yield made
    finally:
        following.cancel()
        await asyncio.wait({following})
    await asyncio.sleep(1)
    assert all(is_empty(engine) for engine in made.engines.values() if not engine.down)
    assert not any(member.in_flight for member in made.fleet.members)


async def settled(made: World) -> None:
    """Until no context of a session is on its way."""
    for _ in range(200):
        await asyncio.sleep(0.05)
        if not any(made.sessions.table.moving(session) for session in made.said):
            return
    raise AssertionError("contexts are still on their way")


@in_virtual_time
async def test_turns_of_a_session_stay_on_their_engine_and_find_all_of_the_turn_before(metrics: Metrics) -> None:
    async with world(metrics) as made:
        homes = {session: await made.turn(session) for session in "stuvwxyz"}
        assert len({engine for engine, _ in homes.values()}) == 3
        for _ in range(3):
            for session, (engine, _) in homes.items():
                there = made.whole_blocks(session)
                assert await made.turn(session) == (engine, there)
        assert made.counts.counts["session_turns_bound"] == 24


@pytest.mark.parametrize("keep", ["none", "tools"])
@in_virtual_time
async def test_a_drain_moves_contexts_and_the_next_turn_finds_them(metrics: Metrics, keep: str) -> None:
    async with world(metrics, **{"session-keep": keep}) as made:
        homes = {session: (await made.turn(session, calls_tool=True))[0] for session in "stuvwxyz"}
        made.fleet.drain("a")
        left = [session for session, engine in homes.items() if engine == "a"]
        assert len(left) > 1
        await asyncio.sleep(0)
        await settled(made)
        assert made.fleet.member("a").in_flight == 0
        assert made.sessions.table.left_on("a") == 0
        assert made.counts.counts["session_moves_moved"] == len(left)
        for session in homes:
            there = made.whole_blocks(session)
            engine, cached = await made.turn(session)
            assert engine != "a"
            assert cached == there
        made.fleet.drain("a", draining=False)
        again = {session: (await made.turn(session))[0] for session in left}
        assert "a" not in again.values()  # it belongs to where its context is


@in_virtual_time
async def test_an_engine_that_stops_is_held_until_its_contexts_have_left(metrics: Metrics) -> None:
    async with world(metrics, "ab", **{"session-keep": "none"}) as made:
        engine = made.engines["a"]
        while sum(1 for session in made.said if made.sessions.table.engine_of(session, "decode") == "a") < 5:
            await made.turn(f"s{len(made.said)}")
        made.fleet.report("a", EngineLoad(waiting=0, running=0, kv_usage=0.0, stopping=True))
        await asyncio.sleep(0)
        empty = 0
        while made.sessions.table.left_on("a"):
            empty += is_empty(engine)
            await asyncio.sleep(0.0005)
        assert made.counts.counts["session_moves_moved"] == 5
        # From the first step, in which it reserves, it has always had a lease.
        assert empty <= 1


@in_virtual_time
async def test_a_turn_that_comes_while_its_context_moves_waits_for_it(metrics: Metrics) -> None:
    slow = engines_of("a", "b", profile=profile_of(speed=200_000.0))  # a turn's KV takes most of a second
    made = World(metrics, slow, "data_parallel", **{"session-keep": "none"})
    following = asyncio.create_task(made.sessions.run())
    home, _ = await made.turn("s")
    there, loop = made.whole_blocks("s"), asyncio.get_running_loop()
    made.fleet.drain(home)
    await asyncio.sleep(0.01)
    began = loop.time()
    engine, cached = await made.turn("s")
    assert (engine != home, cached) == (True, there)
    assert loop.time() - began > 0.2
    following.cancel()


@in_virtual_time
async def test_the_loss_of_an_engine_binds_its_sessions_to_others(metrics: Metrics) -> None:
    async with world(metrics, **{"session-keep": "all"}) as made:
        homes = {session: (await made.turn(session))[0] for session in "stuvwxyz"}
        made.engines["a"].fail()
        moved = {session: await made.turn(session) for session in homes}
        assert all(engine == homes[session] for session, (engine, _) in moved.items() if homes[session] != "a")
        assert all(engine != "a" and not cached for session, (engine, cached) in moved.items()
                   if homes[session] == "a")  # fmt: skip
        for session, (engine, _) in moved.items():
            there = made.whole_blocks(session)
            assert await made.turn(session) == (engine, there)


@in_virtual_time
async def test_a_sessions_pair_stays_together_in_a_program_of_two_engines(metrics: Metrics) -> None:
    async with world(metrics, "abcd", "disaggregated") as made:
        first, _ = await made.turn("s")
        prefill = made.sessions.table.engine_of("s", "prefill")
        assert prefill not in (None, first)
        for _ in range(3):
            assert (await made.turn("s"))[0] == first
            assert made.sessions.table.engine_of("s", "prefill") == prefill


@pytest.mark.parametrize(
    ("keep", "calls_tool", "survives"),
    [("none", True, False), ("tools", True, True), ("tools", False, False), ("all", False, True)],
)
@in_virtual_time
async def test_a_kept_context_outlives_the_traffic_of_others(
    metrics: Metrics, keep: str, calls_tool: bool, survives: bool
) -> None:
    small = engines_of("a", profile=profile_of(blocks=100))
    made = World(metrics, small, "data_parallel", **{"session-keep": keep})
    made.fleet.member("a").kv_tokens = 100 * BLOCK
    following = asyncio.create_task(made.sessions.run())
    await made.turn("s", calls_tool=calls_tool)
    there = made.whole_blocks("s")
    await asyncio.sleep(0.5)
    for other in range(6):  # each takes a fifth of the KV cache
        request = Request(
            seq_id=f"other {other}", prompt=tuple(range(other, other + TURN)), sampling_params={"max_tokens": 2}
        )
        async for _ in made.service.run(request, Trace()):
            pass
    assert await made.turn("s") == ("a", there if survives else 0)
    following.cancel()


@in_virtual_time
async def test_pins_are_given_up_while_requests_wait(metrics: Metrics) -> None:
    async with world(metrics, "a", **{"session-keep": "all"}) as made:
        await made.turn("s")
        await asyncio.sleep(0.5)
        assert made.sessions.table.kept == 1
        made.fleet.report("a", EngineLoad(waiting=1, running=1, kv_usage=0.2))
        await asyncio.sleep(0.5)
        assert made.sessions.table.kept == 0
        assert made.counts.counts["session_pins_given_up"] == 1
        assert is_empty(made.engines["a"])


@in_virtual_time
async def test_a_pin_is_renewed_beyond_an_engines_own_time_for_leases(metrics: Metrics) -> None:
    engines = engines_of("a", lease_ttl=20.0)
    made = World(metrics, engines, "data_parallel", **{"session-keep": "all", "keep-s": 90.0})
    following = asyncio.create_task(made.sessions.run())
    await made.turn("s")
    await asyncio.sleep(80)
    assert not is_empty(engines[0])
    await asyncio.sleep(12)
    assert is_empty(engines[0])
    following.cancel()


@in_virtual_time
async def test_the_last_turn_ends_its_session(metrics: Metrics) -> None:
    async with world(metrics, "ab", **{"session-keep": "all"}) as made:
        await made.turn("s")
        await made.turn("s", headers={"x-dynamo-session-final": "true"})
        assert len(made.sessions.table) == 0
        assert made.sessions.table.kept == 0


@in_virtual_time
async def test_the_hold_of_an_engine_ends_with_the_last_session(metrics: Metrics) -> None:
    """Its last turn ends while its context moves off an engine that leaves."""

    async with world(metrics, "ab", **{"session-keep": "none"}) as made:
        engine, _ = await made.turn("s")
        made.fleet.drain(engine)
        for _ in range(100):
            await asyncio.sleep(0)
            if made.sessions._holds:
                break
        assert made.sessions.table.moving("s")
        made.sessions._act(made.sessions.table.over("s"))
        assert not made.sessions.table
        await asyncio.sleep(10)
        assert not made.sessions._holds
        assert not made.fleet.member(engine).in_flight


@in_virtual_time
async def test_a_stranger_ends_no_session_of_another_client(metrics: Metrics) -> None:
    """The session of one key has the same name as that of another key, and as that of a client without a key."""

    async with world(metrics, "ab", **{"session-keep": "all"}) as made:
        mine = {"authorization": "Bearer mine"}
        engine, _ = await made.turn("s", headers=mine)
        for stranger in ({"authorization": "Bearer theirs"}, {}):
            await made.turn("s", headers={**stranger, "x-dynamo-session-final": "true"})
            assert len(made.sessions.table) == 1
        again, _ = await made.turn("s", headers=mine)
        assert again == engine
        assert made.counts.counts["session_turns_bound"] == 1
        await made.turn("s", headers={"authorization": "bearer mine", "x-dynamo-session-final": "true"})
        assert len(made.sessions.table) == 0


# ---- a router that is restarted --------------------------------------------------------------------------------------


SETTINGS = msgspec.convert({"sessions": "on"}, SessionSettings)


def picked(fleet: EngineFleet, request: Request) -> str:
    with FleetView(fleet).pick(request=request) as engine:
        return engine.name


async def test_a_restarted_router_sends_a_session_to_the_engine_that_has_its_context(
    metrics: Metrics, tmp_path: Path
) -> None:
    """Which is not the one that it would choose for a new session: a drain has moved it."""
    file = tmp_path / "sessions.json"
    fleet = EngineFleet([Member(name, f"sim://{name}", "both", FakeEngine(name)) for name in "abc"])
    first = Sessions(fleet, SETTINGS, SessionCounts(), file=file)
    request = Request(seq_id="1", prompt=(1, 2), headers={"x-dynamo-session-id": "s"})
    await first.begins(request)
    home = picked(fleet, request)
    fleet.drain(home, True)
    other = picked(fleet, request)
    fleet.drain(home, False)
    running = asyncio.create_task(first.run())
    await until(lambda: file.exists())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    Sessions(fleet, SETTINGS, SessionCounts(), file=file)
    assert other != home
    assert picked(fleet, request) == other


@pytest.mark.parametrize("content", [b"", b"[]", b'{"s": {"cook": "a"}}', b'{"s": 3}', b"\xff"])
def test_a_file_of_sessions_that_is_not_one_is_left(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "sessions.json"
    file.write_bytes(content)
    assert len(Sessions(EngineFleet(()), SETTINGS, SessionCounts(), file=file).table) == 0


def test_no_more_sessions_come_back_than_are_remembered(tmp_path: Path) -> None:
    file = tmp_path / "sessions.json"
    file.write_bytes(msgspec.json.encode({f"s{number}": {"decode": "a"} for number in range(5)}))
    few = SessionSettings(together="on", most=2)
    assert list(Sessions(EngineFleet(()), few, SessionCounts(), file=file).table.bindings) == ["s3", "s4"]
