"""Engines that their operator pauses, or that come back with another model at their addresses: they are picked again by
themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest

from tercet.fleet import EngineFleet, FleetView, Member, Trace, membership
from tercet.fleet.membership import REPLACED_AFTER_S, ReplacedModel, ServedModel
from tercet.protocol import EngineLoad, EngineStatus, EngineUnreachable, Request, TercetError
from tercet.protocol.addresses import TextFingerprint
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.service import Service
from tercet_lab.sim import SimEngine
from tests.longest_wait import until
from tests.unit.lab.sim.models import engines_of, is_empty, request_of
from tests.virtual_time import in_virtual_time

from .conftest import Engine, LiveRouter
from .test_moves import running


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


OURS = TextFingerprint("words", "template")


async def status(**fields: object) -> EngineStatus:
    return msgspec.structs.replace(await Engine("e").status(), **fields)


async def test_it_takes_all_that_answer_and_some_time() -> None:
    new, other = await status(fingerprint="new"), await status(fingerprint="other")
    seen = ReplacedModel()
    assert seen.seen(0.0, [new], any_serves=True) is None
    assert seen.seen(1.0, [new, new], any_serves=False) is None
    assert seen.seen(1.0 + REPLACED_AFTER_S / 2, [new, other], any_serves=False) is None  # they differ: it begins again
    assert seen.seen(10.0, [new], any_serves=False) is None
    assert seen.seen(10.0 + REPLACED_AFTER_S / 2, [], any_serves=False) is None
    assert seen.seen(20.0, [new], any_serves=False) is None
    found = seen.seen(
        20.0 + REPLACED_AFTER_S, [new, await status(fingerprint="new", max_model_len=7)], any_serves=False
    )
    assert found is not None
    assert (found.fingerprint, found.max_model_len) == ("new", 7)


@pytest.fixture
async def watched(router: LiveRouter, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LiveRouter]:
    monkeypatch.setattr(membership, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(membership, "REPORTED_WITHIN", 0.0)
    monkeypatch.setattr(membership, "REPLACED_AFTER_S", 0.1)
    await replace(router, "p", "d", weights="old")
    await router.shared.replaced(with_weights(router, "old"))
    await router.membership.speak(OURS)
    router.membership.on_replaced = router.shared.replaced
    watching = asyncio.create_task(router.membership.watch())
    yield router
    watching.cancel()


def with_weights(router: LiveRouter, weights: str) -> ServedModel:
    assert router.shared.state.served_model is not None
    return msgspec.structs.replace(router.shared.state.served_model, fingerprint=weights)


async def replace(router: LiveRouter, *names: str, weights: str, text: TextFingerprint = OURS) -> None:
    for name in names:
        router.engine(name).fingerprint, router.engine(name).text = weights, text


async def serves(router: LiveRouter) -> list[bool]:
    """After a while, whether each engine is picked."""
    for _ in range(4):
        await asyncio.sleep(0.1)
        await router.membership.ask(router.fleet.members)
    return [member.reachable for member in router.fleet.members]


@pytest.mark.slow
async def test_the_router_serves_other_weights_once_all_engines_have_them(watched: LiveRouter) -> None:
    await replace(watched, "p", weights="new")
    assert await serves(watched) == [False, True]  # the old model serves until its last engine has gone
    await replace(watched, "d", weights="new")
    await until(lambda: all(member.reachable for member in watched.fleet.members))
    assert watched.membership.served_model is not None
    assert watched.membership.served_model.fingerprint == "new"
    assert watched.shared.state.served_model == watched.membership.served_model  # so it is after a restart
    await replace(watched, "d", weights="old")
    assert await serves(watched) == [True, False]


@pytest.mark.parametrize(
    "fields", [{"text": TextFingerprint("swapped", "template")}, {"model": "x"}, {"max_model_len": 9}]
)
async def test_what_this_router_cannot_serve_stays_refused(watched: LiveRouter, fields: dict[str, object]) -> None:
    await replace(watched, "p", "d", weights="new")
    for name in ("p", "d"):
        for field, value in fields.items():
            setattr(watched.engine(name), field, value)
    assert await serves(watched) == [False, False]
    with pytest.raises(EngineUnreachable):
        watched.fleet.health.require_answers()


async def test_an_answer_does_not_go_on_with_another_model(router: LiveRouter) -> None:
    async def replaced_while_it_runs() -> None:
        async with running(router) as (_, sequence):
            assert sequence.tokens
            await router.shared.replaced(with_weights(router, "new"))

    with pytest.raises(EngineUnreachable, match="the model was replaced by another one while this request ran"):
        await replaced_while_it_runs()
    assert await router.has_everything_back()
