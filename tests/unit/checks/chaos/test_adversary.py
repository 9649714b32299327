"""The hostile client of ``tercet chaos``: what it does, what is noticed of it, and that nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tercet.protocol import BadRequest
from tercet_checks.chaos import simulated_arena
from tercet_checks.chaos.adversary import (
    REFUSED_SECONDS,
    TRICKS,
    Adversary,
    PlannedTrick,
    Sizes,
    TrickKind,
    parse_tricks,
    plan_tricks,
)
from tercet_checks.chaos.chaos_report import ChaosResult, FaultSchedule, plan_faults
from tercet_checks.chaos.simulated_arena import SimulatedFleet, run_simulated
from tests.unit.checks.chaos.test_invariants import FLEET, LOAD

Answering = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def run(kinds: tuple[TrickKind, ...], seed: int = 1, seconds: float = 30.0, faults: float = 0.0) -> ChaosResult:
    schedule = FaultSchedule(seed, seconds, ())
    if faults:
        schedule = plan_faults(seed, FLEET.shape(), seconds / 60, faults)
    tricks = plan_tricks(seed, seconds, 120.0, kinds)
    return run_simulated(FLEET, schedule, LOAD, patience=60.0, tricks=tricks)


@pytest.fixture(scope="module")
def everything() -> ChaosResult:
    """A run in which the client plays each trick several times."""
    return run(TRICKS)


@pytest.mark.slow
def test_everything_holds_while_a_client_does_all_of_it(everything: ChaosResult) -> None:
    assert [str(found) for found in everything.violations] == []
    assert {trick.planned.kind for trick in everything.tricks} == set(TRICKS)
    assert len(everything.records) > 200
    # No engine is blamed: no fault happens, and nobody's request was tried again.
    assert everything.retries == 0


@pytest.mark.slow
def test_everything_holds_with_faults_at_the_same_time() -> None:
    result = run(TRICKS, seed=2, seconds=15.0, faults=300)
    assert [str(found) for found in result.violations] == []


@pytest.mark.slow
def test_the_same_seed_is_the_same_run() -> None:
    first, again = (run(TRICKS, seed=3, seconds=8.0) for _ in range(2))
    assert first.records == again.records
    assert first.tricks == again.tricks


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRICKS)
def test_each_trick_meets_its_bound(kind: TrickKind, everything: ChaosResult) -> None:
    """What is refused is refused, and what is cut off is cut off; nothing of it succeeds by chance."""
    played = [trick for trick in everything.tricks if trick.planned.kind == kind]
    assert len(played) > 2
    statuses = {status for trick in played for status in trick.statuses}
    expected = {
        "many_sequences": {400}, "long_bodies": {200, 400, 413}, "wrong_items": {400, 404}, "odd_text": {400},
        "odd_labels": {400, 413, 415}, "poisonous_grammars": {400},
        "unfinished_bodies": {408, 429}, "unfinished_heads": {408}, "long_heads": {431}, "long_names": {200, 400, 404},
        "silence": {0}, "slow_reading": set[int](), "leaving": set[int](),
    }[kind]  # fmt: skip
    assert statuses <= expected
    assert bool(statuses) == bool(expected)


@pytest.mark.slow
def test_a_router_without_a_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.router.router_app.require_few_sequences", lambda *_: None)
    monkeypatch.setattr("tercet.aio.incoming.Incoming.expired", lambda _: None)
    found = run(("silence",), seconds=3.0).violations
    assert {each.rule for each in found} >= {"a hostile client is cut off"}


@pytest.mark.slow
def test_bodies_that_are_kept_for_ever_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.router.request_bodies.BodiesHeld.forget", lambda *_: None)
    monkeypatch.setattr("tercet.router.request_bodies.BodiesHeld.require_room", _count_alone)
    found = run(("unfinished_bodies",), seconds=3.0).violations
    assert {each.rule for each in found} >= {"nothing is left behind", "no failure goes unhandled"}


@pytest.mark.slow
def test_names_that_are_kept_whole_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.router.serve.service.sequence_id", lambda name: name)
    monkeypatch.setattr("tercet.router.observe.request_traces.kept_name", lambda name: name)
    monkeypatch.setattr("tercet.router.router_app.kept_name", lambda name, _longest: name)
    monkeypatch.setattr("tercet.logs.kept_name", lambda name: name)
    result = run(("long_names",), seconds=20.0)
    assert any("traces" in str(found) for found in result.violations)


def _count_alone(bodies: object, _body: object, size: int) -> None:
    bodies.size += size  # type: ignore[attr-defined]


def test_kinds_are_chosen_by_name() -> None:
    assert parse_tricks("silence, long-bodies") == ("long_bodies", "silence")
    assert parse_tricks("none") == ()
    with pytest.raises(BadRequest, match="--adversary: 'rain' is not a trick"):
        parse_tricks("silence,rain")
    assert plan_tricks(1, 60.0, 30.0, ()) == ()
    planned = plan_tricks(1, 600.0, 30.0, TRICKS)
    counts = {kind: sum(trick.kind == kind for trick in planned) for kind in TRICKS}
    assert max(counts.values()) - min(counts.values()) <= 1


@asynccontextmanager
async def a_server(answering: Answering) -> AsyncGenerator[tuple[str, int]]:
    server = await asyncio.start_server(answering, "127.0.0.1")
    async with server:
        yield server.sockets[0].getsockname()[:2]


async def _whole(reader: asyncio.StreamReader) -> None:
    """Read a request: a server that answers before would reset the connection, and its answer might be lost."""
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))


async def _five_hundred(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _whole(reader)
    writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n")
    await writer.drain()
    writer.close()


async def _served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _whole(reader)
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    await writer.drain()
    writer.close()


@pytest.mark.parametrize(
    ("kind", "answering", "wrong"),
    [
        ("long_bodies", _five_hundred, "500"),
        ("wrong_items", _served, "200"),
        ("many_sequences", _served, "200"),
        ("poisonous_grammars", _served, "200"),
    ],
)
async def test_wrong_answers_are_named(kind: TrickKind, answering: Answering, wrong: str) -> None:
    async with a_server(answering) as (host, port):
        adversary = Adversary(host, port, "m", 1, Sizes(items=10, body=1000), asyncio.get_running_loop().time)
        await adversary.play(PlannedTrick(0.0, kind, 0))
    (played,) = adversary.played
    assert wrong in played.wrong
    assert f"{kind}" == played.planned.kind


def test_what_is_cut_off_takes_longer_than_any_bound_of_the_router() -> None:
    from tercet.aio.incoming import SECONDS

    assert REFUSED_SECONDS > 2 * SECONDS
    assert simulated_arena.MOST_BYTES < 2**21


@pytest.mark.slow
def test_a_fleet_of_one_engine_holds_too() -> None:
    result = run_simulated(
        SimulatedFleet(prefill=0, decode=1), FaultSchedule(1, 8.0, ()), LOAD, patience=60.0,
        tricks=plan_tricks(1, 8.0, 120.0, TRICKS),
    )  # fmt: skip
    assert [str(found) for found in result.violations] == []
