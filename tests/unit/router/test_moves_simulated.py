"""Moves between simulated engines, in virtual time: what they cost can be worked out by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tercet.fleet import EngineFleet, Member, Trace
from tercet.protocol import EngineLoad
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.moves import MoveRecord
from tercet.router.serve.service import Service
from tercet.settings import MoveSettings
from tercet_lab.sim import SimEngine, run_virtual
from tests.unit.lab.sim.models import KV_BYTES, engines_of, is_empty, profile_of, request_of
from tests.virtual_time import in_virtual_time

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
