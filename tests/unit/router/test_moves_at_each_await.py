"""Moves that are stopped at each turn of the event loop, from either side, programs that catch whatever comes, and what
moves cost between simulated engines, worked out by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tercet.fleet import EngineFleet, Member, RunningSequence, Trace
from tercet.protocol import EngineLoad, EngineUnreachable, Request, TercetError
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.moves import MoveRecord
from tercet.router.serve.plans import Plan
from tercet.router.serve.service import Service
from tercet.settings import MoveSettings
from tercet_lab.sim import SimEngine, run_virtual
from tests.longest_wait import LONGEST_WAIT_S
from tests.unit.lab.sim.models import KV_BYTES, engines_of, is_empty, profile_of, request_of
from tests.virtual_time import in_virtual_time

from .conftest import LiveRouter
from .test_moves import HOLD, PROMPT, TOKENS, WHOLE, Client, running, turns

# More than a move takes from its beginning to the first output at the destination.
MOST_TURNS = 40


@asynccontextmanager
async def held(router: LiveRouter, number: int) -> AsyncGenerator[tuple[Client, RunningSequence, asyncio.Task[None]]]:
    """A sequence that waits at ``d`` before its tenth token, and at ``p`` a little later."""
    router.engine("d").let(HOLD)
    router.engine("p").let(HOLD + 5)
    request = Request(seq_id=f"s{number}", prompt=PROMPT, sampling_params={"max_tokens": TOKENS})
    client = Client(router.service.run(request, Trace()), Trace())
    task = asyncio.create_task(client.read())
    await turns(lambda: len(client.tokens) == HOLD)
    (sequence,) = router.service.sequences
    try:
        yield client, sequence, task
    finally:
        let_go(router)
        task.cancel()
        await asyncio.wait([task])
    assert await router.has_everything_back()
    assert (len(router.service.sequences), len(router.service.moves.under_way)) == (0, 0)


@asynccontextmanager
async def moving(
    router: LiveRouter, number: int
) -> AsyncGenerator[tuple[Client, RunningSequence, asyncio.Task[None], asyncio.Task[Any]]]:
    """The same, ``number`` turns after a move of it to ``p`` has been asked for."""
    async with held(router, number) as (client, sequence, task):
        move = asyncio.create_task(router.service.moves.move(sequence, "p", "test"))
        await after(number)
        yield client, sequence, task, move


def let_go(router: LiveRouter) -> None:
    for engine in router.engines.values():
        engine.let(None)


async def runs_to_its_end(router: LiveRouter, task: asyncio.Task[None]) -> None:
    let_go(router)
    await asyncio.wait_for(task, LONGEST_WAIT_S)


async def prepare(router: LiveRouter) -> None:
    await router.use(Plan(program="data_parallel"))
    await router.shared.change(lambda state: state.with_draining("p", True))


async def after(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def outcome_of(move: asyncio.Task[Any]) -> str:
    with suppress(TercetError, asyncio.CancelledError):
        return (await asyncio.wait_for(move, LONGEST_WAIT_S)).outcome
    return "not moved"


async def test_the_client_leaves_at_each_turn(router: LiveRouter) -> None:
    await prepare(router)
    outcomes = set[str]()
    for number in range(MOST_TURNS):
        async with moving(router, number) as (client, _, task, move):
            task.cancel()
            await asyncio.wait([task])
            outcomes.add(await outcome_of(move))
            assert client.tokens == WHOLE[: len(client.tokens)]
    assert outcomes == {"moved", "not moved"}


async def test_whoever_asked_for_the_move_leaves_at_each_turn(router: LiveRouter) -> None:
    """The sequence goes on, here or there; nothing of the move is left."""
    await prepare(router)
    engines = set[str]()
    for number in range(MOST_TURNS):
        async with moving(router, number) as (client, sequence, task, move):
            move.cancel()
            await asyncio.wait([move])
            await runs_to_its_end(router, task)
            assert client.tokens == WHOLE
            assert sequence.attempt == 0, "a move spends no retry"
            engines.add(sequence.engine)
    assert engines == {"p", "d"}


async def test_the_sequence_ends_at_each_turn(router: LiveRouter) -> None:
    await prepare(router)
    outcomes = set[str]()
    for number in range(MOST_TURNS):
        async with moving(router, number) as (client, sequence, task, move):
            await runs_to_its_end(router, task)
            outcomes.add(await outcome_of(move))
            assert client.tokens == WHOLE
            assert sequence.attempt == 0
    assert outcomes == {"moved", "not moved"}


@pytest.mark.parametrize("verb", ["prep_recv", "remote_send"])
async def test_either_engine_fails_at_each_turn_of_its_verb(router: LiveRouter, verb: str) -> None:
    """An engine that fails before the cut-over leaves the sequence where it is."""
    await prepare(router)
    failing = router.engine("p" if verb == "prep_recv" else "d")
    for number in range(12):
        async with moving(router, number) as (client, sequence, task, move):
            failing.failures[verb] = EngineUnreachable("gone")
            outcome = await outcome_of(move)
            failing.failures.clear()
            assert sequence.engine == ("p" if outcome == "moved" else "d")
            await runs_to_its_end(router, task)
            assert client.tokens == WHOLE


CATCHING = """
from tercet.protocol import Output

async def around_its_yield(request, fleet):
    with fleet.pick("decode") as engine:
        try:
            yield engine.start_generate(request)
        except GeneratorExit:
            raise
        except BaseException:
            yield Output((666,), "stop")

async def silently(request, fleet):
    with fleet.pick("decode") as engine:
        try:
            yield engine.start_generate(request)
        except BaseException:
            return

async def around_its_loop(request, fleet):
    with fleet.pick("decode") as engine:
        try:
            async for output in engine.start_generate(request):
                try:
                    yield output
                except BaseException:
                    pass
        except BaseException:
            yield Output((666,), "stop")

async def around_each_step(request, fleet):
    with fleet.pick("decode") as engine:
        stream = engine.start_generate(request)
        while True:
            try:
                output = await anext(stream, None)
            except BaseException:
                continue
            if output is None:
                return
            yield output

async def by_a_timeout_of_its_own(request, fleet):
    import asyncio
    with fleet.pick("decode") as engine:
        try:
            async with asyncio.timeout(60):
                async for output in engine.start_generate(request):
                    yield output
        except Exception:
            yield Output((666,), "stop")
"""


@pytest.mark.parametrize(
    "program", ["around_its_yield", "silently", "around_its_loop", "around_each_step", "by_a_timeout_of_its_own"]
)
async def test_a_program_that_catches_everything_does_not_notice_moves(
    router: LiveRouter, tmp_path: Path, program: str
) -> None:
    """Nothing is raised where it waits, so there is nothing to swallow; the counts of its pick go along."""
    (tmp_path / "catching.py").write_text(CATCHING)
    async with running(router, program=f"{tmp_path / 'catching.py'}:{program}") as (_, sequence):
        for turn in range(6):
            destination, other = ("p", "d") if turn % 2 == 0 else ("d", "p")
            router.engine(destination).let(HOLD + 1 + turn)
            move = await router.service.moves.move(sequence, destination, "test")
            assert move.outcome == "moved"
            assert {member.name: member.in_flight for member in router.fleet.members} == {destination: 1, other: 0}
            await turns(lambda at=HOLD + 1 + turn: len(sequence.tokens) == at)
        assert (sequence.attempt, sequence.moves) == (0, 6)
    assert router.service.routing.failures == {}


STEP = 0.010
OUTPUT = 400


async def serve(
    metrics: Metrics, length: int, speed: float, others: int = 0, load: EngineLoad | None = None, **settings: Any
) -> tuple[MoveRecord, list[SimEngine]]:
    """One request of ``length`` tokens is moved after its 20th token; every answer must be that of one that stays.

    The engine that it leaves has reported ``load``.
    """
    engines = engines_of("a", "b", profile=profile_of(speed=speed), stream_every=1)
    clock = asyncio.get_running_loop().time
    members = [Member("a", "", "prefill", engines[0]), Member("b", "", "decode", engines[1])]
    fleet, moves = EngineFleet(members, clock=clock), MoveSettings(**settings)
    service = Service(fleet, "data_parallel", {"role": "prefill"}, metrics, moves=moves)
    requests = [request_of(f"s{n}", length, OUTPUT, first=n * 10_000) for n in range(1 + others)]
    tokens: list[list[int]] = [[] for _ in requests]
    streams = [service.run(request, Trace()) for request in requests]
    reading = [
        asyncio.create_task(stream.run(lambda output, into=into: into.extend(output.token_ids)))
        for stream, into in zip(streams, tokens, strict=True)
    ]
    while len(tokens[0]) < 20:
        await asyncio.sleep(STEP / 2)
    if load is not None:
        fleet.knowledge.loads.report("a", load)
    move = await service.moves.move(service.sequences.named("s0"), "b", "test")
    assert [sequence.engine for sequence in service.sequences] == ["b"] + ["a"] * others
    await asyncio.gather(*reading)
    for request, got in zip(requests, tokens, strict=True):
        assert tuple(got) == engines[0].network.prompt(request.prompt, None, None).output(0, OUTPUT)
    return move, engines


@pytest.mark.parametrize("length", [256, 1024, 8192])
@in_virtual_time
async def test_the_pause_is_flat_and_at_most_two_steps(metrics: Metrics, length: int) -> None:
    move, engines = await serve(metrics, length, speed=1e9)
    assert move.pause is not None
    assert STEP <= move.pause <= 2.5 * STEP
    assert move.stages[0].begin == 0
    assert move.stages[0].bytes == move.stages[0].end * KV_BYTES
    assert move.recomputed <= 16
    await asyncio.sleep(1)
    assert all(is_empty(engine) for engine in engines)


@in_virtual_time
async def test_a_slow_link_takes_more_stages_and_the_sequence_decodes_meanwhile(metrics: Metrics) -> None:
    # The first stage takes a second, in which a hundred tokens come.
    move, engines = await serve(metrics, 1000, speed=1000 * KV_BYTES, stages=6)
    assert len(move.stages) >= 2
    assert [stage.begin for stage in move.stages[1:]] == [
        stage.end // engines[0].profile.block_size * engines[0].profile.block_size for stage in move.stages[:-1]
    ]
    assert move.pause is not None
    assert move.pause <= 4 * STEP
    assert move.seconds >= 0


@pytest.mark.parametrize("share", [1.0, 0.25])
@in_virtual_time
async def test_a_stage_goes_in_portions_and_rests_in_between(metrics: Metrics, share: float) -> None:
    # A portion of a hundred tokens takes 25 ms, and until the step is over in which it was asked for.
    move, _ = await serve(metrics, 1000, speed=4000 * KV_BYTES, stages=1, portion=100, share=share)
    (stage,) = move.stages
    assert (stage.begin, stage.bytes) == (0, pytest.approx(stage.end * KV_BYTES, rel=0.2))
    assert stage.end > 1000
    assert stage.seconds > stage.end / 4000
    assert move.seconds == pytest.approx(stage.seconds / share, rel=0.2)


@pytest.mark.parametrize(
    ("load", "share"),
    [
        (None, 0.25), (EngineLoad(waiting=0, running=1, kv_usage=0.79), 0.25),
        (EngineLoad(waiting=0, running=1, kv_usage=0.8), 1.0), (EngineLoad(waiting=1, running=1, kv_usage=0.1), 1.0),
    ],
)  # fmt: skip
@in_virtual_time
async def test_a_move_from_an_engine_without_room_takes_no_rests(
    metrics: Metrics, load: EngineLoad | None, share: float
) -> None:
    """Who waits there for room waits longer than a step that a send makes slower."""

    move, _ = await serve(metrics, 1000, speed=4000 * KV_BYTES, load=load, stages=1, portion=100)
    assert move.seconds == pytest.approx(move.stages[0].seconds / share, rel=0.2)


def test_when_a_move_hurries_can_be_set() -> None:
    settings = MoveSettings(share=0.5, hurry_at=1.0)
    assert [settings.share_at(usage, waiting) for usage, waiting in ((0.9, 0), (1.0, 0), (0.1, 3))] == [0.5, 1.0, 1.0]


@in_virtual_time
async def test_a_send_of_a_running_sequence_computes_nothing(metrics: Metrics) -> None:
    _, engines = await serve(metrics, 500, speed=1e9, others=3)
    assert engines[0].counters.prefill_tokens == 4 * 500
    assert engines[1].counters.prefill_tokens <= 16


def test_a_move_is_the_same_whether_tokens_come_one_by_one_or_are_held_back(metrics: Metrics) -> None:
    async def moved(stream_every: int) -> tuple[MoveRecord, float, tuple[int, ...]]:
        loop = asyncio.get_running_loop()
        engines = engines_of("a", "b", profile=profile_of(), stream_every=stream_every)
        members = [Member(engine.name, "", "both", engine) for engine in engines]
        service = Service(EngineFleet(members, clock=loop.time), "data_parallel", {}, metrics)
        said: list[int] = []
        stream = service.run(request_of("s", 1000, OUTPUT), Trace())
        reading = asyncio.create_task(stream.run(lambda output: said.extend(output.token_ids)))
        await asyncio.sleep(1.503)
        move = await service.moves.move(service.sequences.named("s"), "b", "test")
        await reading
        return move, loop.time(), tuple(said)

    (held_back, ended, said), (each, ended_each, said_each) = (run_virtual(moved(every)) for every in (0, 1))
    assert (ended, said) == (pytest.approx(ended_each), said_each)
    assert (held_back.stages[0].end, held_back.recomputed) == (each.stages[0].end, each.recomputed)
    assert held_back.pause == pytest.approx(each.pause)
    assert held_back.stages[0].end > 1000
