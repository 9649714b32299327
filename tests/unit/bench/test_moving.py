"""What ``tercet bench migration`` measures, on simulated engines in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from tercet.bench.moving import DESTINATION, SOURCE, MoveCost, measure_move
from tercet.fleet import EngineFleet, Member
from tercet.settings import MoveSettings
from tercet.sim import run_virtual

from ..sim.models import engines_of, is_empty, profile_of

STEP, PER_TOKEN, SPEED = 0.010, 0.001, 1e9


async def measured(way: str, length: int) -> MoveCost:
    engines = engines_of(SOURCE, DESTINATION, profile=profile_of(speed=SPEED), stream_every=1)
    members = [Member(engine.name, "", "both", engine) for engine in engines]
    fleet = EngineFleet(members, clock=asyncio.get_running_loop().time)
    found = await measure_move(fleet, way, length, MoveSettings(), seed=1)
    await asyncio.sleep(1)
    assert all(is_empty(engine) for engine in engines)
    assert [member.in_flight for member in members] == [0, 0]
    return found


@pytest.mark.parametrize("length", [128, 1000])
def test_three_ways_in_virtual_time(length: int) -> None:
    async def check() -> None:
        live, blocking, recompute = [await measured(way, length) for way in ("live", "blocking", "recompute")]
        # Two sequences decode in a step: 10 ms, and 1 ms for the second one's token.
        assert live.step == pytest.approx(STEP + PER_TOKEN)
        assert live.pause <= 2 * live.step
        assert [len(cost.stages) for cost in (live, blocking, recompute)] == [1, 1, 0]
        assert blocking.pause >= 0
        assert recompute.pause >= length * PER_TOKEN - STEP

    run_virtual(check())
