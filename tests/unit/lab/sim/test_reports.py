"""Simulated fleets know of their engines what real ones do: load and cached blocks, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import math

from tercet.decisions.scheduling import Scheduling, SchedulingProfile
from tercet.decisions.scheduling.profiles import MaxScorePicker
from tercet.fleet import EngineFleet, FleetView, Member
from tercet_lab.bench.simulated.moving_fleet import EngineObserver
from tercet_lab.sim import Network, SimEngine
from tercet_lab.sim.engine_options import EngineOptions
from tercet_lab.sim.sim_engine import REPORT_SECONDS
from tests.virtual_time import in_virtual_time

from .models import BLOCK, profile_of, request_of, tokens_of


def observed(blocks: int = 1000) -> tuple[EngineFleet, SimEngine]:
    engine = SimEngine("e", profile_of(blocks=blocks), Network(), EngineOptions())
    fleet = EngineFleet([Member("e", "sim://e", "both", engine)], stale_after=math.inf)
    observer = EngineObserver(fleet.knowledge, "e", BLOCK)
    fleet.knowledge.hear_from(lambda: engine.observe(observer), lambda: engine.observe_blocks(observer))
    return fleet, engine


@in_virtual_time
async def test_blocks_are_known_as_they_come_and_go() -> None:
    fleet, engine = observed(blocks=10)
    first, second = request_of("a", 100), request_of("b", 100, first=5000)
    await tokens_of(engine, first)  # before anybody asks
    assert fleet.knowledge.cached_tokens("e", first) == 96
    await tokens_of(engine, second)
    assert fleet.knowledge.cached_tokens("e", second) == 96
    assert fleet.knowledge.cached_tokens("e", first) < 96, "there is no room for both"
    engine.fail()
    engine.recover()
    assert fleet.knowledge.cached_tokens("e", second) == 0
    await tokens_of(engine, second)
    assert fleet.knowledge.cached_tokens("e", second) == 96


@in_virtual_time
async def test_load_is_reported_at_most_once_in_a_while_and_not_at_rest() -> None:
    fleet, engine = observed()
    times: list[float] = []
    loop = asyncio.get_running_loop()
    report = fleet.knowledge.loads.report

    def noted(name: str, load: object) -> None:
        times.append(loop.time())
        report(name, load)  # type: ignore[arg-type]

    fleet.knowledge.loads.report = noted  # type: ignore[method-assign]
    fleet.knowledge.start_reports()
    works = [asyncio.ensure_future(tokens_of(engine, request_of(f"s{i}", 100, 50, i * 1000))) for i in range(3)]
    await asyncio.sleep(0.3)
    last = fleet.knowledge.loads.last("e")
    assert last is not None
    assert last[0].running == 3
    assert last[0].kv_usage > 0
    await asyncio.gather(*works)
    await asyncio.sleep(100)
    last = fleet.knowledge.loads.last("e")
    assert last is not None
    assert (last[0].running, last[0].waiting) == (0, 0)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert min(gaps) >= REPORT_SECONDS - 1e-9
    assert len(times) < 30, "an engine at rest says nothing"


@in_virtual_time
async def test_a_pick_by_profile_asks() -> None:
    fleet, _engine = observed()
    fleet.scheduling = Scheduling({"p": SchedulingProfile("p", [], [], MaxScorePicker())})
    with FleetView(fleet).pick(by="p"):
        assert fleet.knowledge.loads.last("e") is not None


@in_virtual_time
async def test_blocks_are_told_of_once_somebody_asks_for_them() -> None:
    fleet, engine = observed()
    fleet.knowledge.start_reports()
    await tokens_of(engine, request_of("a", 100))
    assert not fleet.knowledge.indexes
    assert fleet.knowledge.cached_tokens("e", request_of("b", 100)) == 96
    assert fleet.knowledge.indexes
    engine.fail()
    engine.recover()
    assert fleet.knowledge.cached_tokens("e", request_of("b", 100)) == 0


@in_virtual_time
async def test_nothing_is_told_before_somebody_asks() -> None:
    fleet, engine = observed()
    await tokens_of(engine, request_of("a", 100))
    assert fleet.knowledge.loads.last("e") is None
    with FleetView(fleet).pick(by="round_robin"):
        assert fleet.knowledge.loads.last("e") is None
    fleet.knowledge.cached_tokens("e", request_of("b", 100))
    assert fleet.knowledge.loads.last("e") is not None


@in_virtual_time
async def test_the_step_time_is_that_of_recent_steps() -> None:
    """A prompt of 10,000 tokens makes a step of many times a decode's; it weighs less with each later step."""

    _, engine = observed()
    assert engine.load().step_time is None
    await tokens_of(engine, request_of("a", 10_000, max_tokens=1))
    prefill = engine.load().step_time
    await tokens_of(engine, request_of("b", 100, max_tokens=200, first=20_000))
    decode = engine.load().step_time
    before = asyncio.get_running_loop().time()
    await tokens_of(engine, request_of("c", 100, max_tokens=101, first=30_000))
    each = (asyncio.get_running_loop().time() - before) / 101
    assert prefill is not None
    assert decode is not None
    assert prefill > 10 * decode
    assert math.isclose(decode, each, rel_tol=0.3)
