"""Engines that their operator pauses: others take what waits there, and they are picked again by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tercet.fleet import EngineFleet, FleetView, Member, Trace
from tercet.protocol import EngineLoad, EngineUnreachable, Request, TercetError
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.service import Service
from tercet_lab.sim import SimEngine
from tests.unit.lab.sim.models import engines_of, is_empty, request_of
from tests.virtual_time import in_virtual_time

from .conftest import LiveRouter


class Reports:
    """What an engine tells the fleet of itself."""

    def __init__(self, fleet: EngineFleet, name: str) -> None:
        self._fleet, self._name = fleet, name

    def load(self, load: EngineLoad) -> None:
        self._fleet.report(self._name, load)

    def stored(self, hashes: Sequence[int]) -> None: ...

    def dropped(self, hashes: Sequence[int]) -> None: ...

    def cleared(self) -> None: ...


def reporting(engines: list[SimEngine], program: str, metrics: Metrics) -> tuple[Service, EngineFleet]:
    """A service over engines whose load reports reach it."""
    members = [Member(engine.name, f"sim://{engine.name}", "both", engine) for engine in engines]
    fleet = EngineFleet(members, clock=asyncio.get_running_loop().time)
    for engine in engines:
        engine.observe(Reports(fleet, engine.name))
    return Service(fleet, program, {}, metrics), fleet


async def answer(service: Service, request: Request) -> list[int]:
    return [token async for output in service.run(request, Trace()) for token in output.token_ids]


@pytest.mark.parametrize("program", ["disaggregated", "data_parallel"])
@in_virtual_time
async def test_an_engine_paused_at_any_moment_costs_no_token(program: str, metrics: Metrics) -> None:
    request = request_of("s", length=200, max_tokens=8)
    service, _ = reporting(engines_of("p", "d", "e"), program, metrics)
    begun = asyncio.get_running_loop().time()
    expected = await answer(service, request)
    whole = asyncio.get_running_loop().time() - begun
    for moment in range(12):
        for victim in range(3):
            engines = engines_of("p", "d", "e")
            service, fleet = reporting(engines, program, metrics)
            asking = asyncio.ensure_future(answer(service, request))
            await asyncio.sleep(whole * moment / 12)
            engines[victim].freeze("all")
            assert await asking == expected
            assert all(member.in_flight == 0 for member in fleet.members)
            engines[victim].thaw()
            await asyncio.sleep(1)
            assert len(fleet.open) == 3
            assert all(is_empty(engine) for engine in engines)


@in_virtual_time
async def test_with_no_other_engine_a_sequence_waits_until_it_is_resumed(metrics: Metrics) -> None:
    (engine,) = engines_of("p")
    service, fleet = reporting([engine], "data_parallel", metrics)
    asking = asyncio.ensure_future(answer(service, request_of("s", max_tokens=20)))
    await asyncio.sleep(0.2)
    engine.freeze("all")
    await asyncio.sleep(100)
    assert not asking.done()
    with pytest.raises(TercetError):
        fleet.health.require_answers()
    engine.thaw()
    assert len(await asking) == 20


def paused(what: str) -> EngineLoad:
    return EngineLoad(waiting=0, running=1, kv_usage=0.1, paused=what)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["new", "all"])
def test_what_waits_is_lost_and_what_has_begun_only_if_it_is_paused_too(router: LiveRouter, what: str) -> None:
    lost: list[str] = []
    calls = router.fleet.member("d").calls
    calls.note(lambda _: lost.append("waits"))
    calls.note(lambda _: lost.append("runs"), lambda: False)
    router.fleet.report("d", paused(what))
    assert lost == (["waits"] if what == "new" else ["waits", "runs"])
    with FleetView(router.fleet).pick() as engine:
        assert engine.name == "p"
    router.fleet.report("d", paused(""))
    with FleetView(router.fleet).pick() as one, FleetView(router.fleet).pick() as other:
        assert {one.name, other.name} == {"d", "p"}


def test_when_the_other_engine_comes_later_it_takes_what_waits(router: LiveRouter) -> None:
    errors: list[TercetError] = []
    router.fleet.member("p").reachable = False
    router.fleet.member("d").calls.note(errors.append)
    router.fleet.report("d", paused("all"))
    assert not errors
    router.fleet.member("p").reachable = True
    router.fleet.report("d", paused("all"))
    (error,) = errors
    assert isinstance(error, EngineUnreachable)
    assert error.blames == "d"


def test_a_restart_ends_a_pause(router: LiveRouter) -> None:
    router.fleet.report("d", paused("all"))
    router.fleet.health.restarted("d")
    assert len(router.fleet.open) == 2
