"""Context migration over HTTP, the metrics of routes, and the most wanted contexts, which outlive their engine:
simulated engines in virtual time leave, start, freeze and die.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest

from tercet.decisions.cost import RouteDecision, RouteOption
from tercet.fleet import EngineFleet, FleetView, Member, Trace
from tercet.protocol import Conflict, MemberRole, Request, Reservation, TercetError
from tercet.protocol.spans import PickEvent, TraceEvent
from tercet.router.admin import admin_routes
from tercet.router.observe.metrics import CopyOutcome, CopyReason, HotContextMetrics, Metrics
from tercet.router.serve.context_copies import REMEMBERED, HotContexts, Passed
from tercet_lab.sim import SimEngine, run_virtual
from tests.unit.lab.sim.models import engines_of, is_empty, profile_of
from tests.virtual_time import in_virtual_time

from .conftest import LiveRouter, counted

SECONDS = 5.0
SHARED = 640


class Counted(HotContextMetrics):
    """Counts that belong to one test."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.tokens: Counter[str] = Counter()

    def ended(self, at: CopyReason, outcome: CopyOutcome, tokens: int = 0) -> None:
        self.outcomes[at, outcome] += 1
        self.tokens[at] += tokens


class Hot:
    """A fleet of these roles by name, and its hot contexts; KV goes at ``speed`` tokens a second."""

    def __init__(self, roles: dict[str, MemberRole], speed: float = 1e6) -> None:
        profile = profile_of(speed=speed * profile_of().model.kv_bytes_per_token, latency=0.001)
        self.engines = {engine.name: engine for engine in engines_of(*roles, profile=profile)}
        self.clock = asyncio.get_running_loop().time
        self.members = {
            name: Member(name, "", role, self.engines[name], kv_tokens=16_000) for name, role in roles.items()
        }
        self.fleet = EngineFleet([*self.members.values()], clock=self.clock)
        self.metrics = Counted()
        self.hot = HotContexts(self.fleet, self.metrics, SECONDS)
        self.running = asyncio.ensure_future(self.hot.run())
        self._number = 0

    async def meet(self) -> None:
        """Learn what the engines are, as a router does."""
        for member in self.members.values():
            member.revision = (await member.engine.status()).revision

    async def serve(self, topic: int, on: str | None = None) -> tuple[str, int]:
        """Serve a prompt of a topic, which all of its prompts begin with; return the engine and the cached tokens."""
        self._number += 1
        own = range(10**6 + 100 * self._number, 10**6 + 100 * self._number + 100)
        prompt = (*range(topic * 10_000, topic * 10_000 + SHARED), *own)
        request = Request(seq_id=f"r{self._number}", prompt=prompt, sampling_params={"max_tokens": 2})
        view = FleetView(self.fleet, Trace(), request=request)
        with view.engine(on) if on is not None else view.pick("both", request=request) as engine:
            outputs = [output async for output in engine.start_generate(request)]
        assert outputs[0].usage is not None
        return engine.name, outputs[0].usage.cached

    async def restart(self, name: str) -> None:
        """Restart an engine, which the router notices at the next contact."""
        self.engines[name].fail()
        self.engines[name].recover()
        self.fleet.health.restarted(name)

    async def until(self, condition: Callable[[], object], seconds: float = SECONDS + 0.2) -> float:
        began = self.clock()
        while not condition():
            assert self.clock() < began + seconds
            await asyncio.sleep(0.01)
        return self.clock() - began

    async def end(self) -> None:
        """End the copies, and check that everything was given back."""
        self.running.cancel()
        await asyncio.wait({self.running})
        await asyncio.sleep(1)
        assert all(is_empty(engine) for engine in self.engines.values() if not engine.down)
        assert not any(member.in_flight or member.warming or len(member.calls) for member in self.members.values())


async def busy(roles: dict[str, MemberRole], topics: int = 3, speed: float = 1e6) -> Hot:
    """A fleet whose engines ``a`` and ``b`` have served prompts of these topics."""
    found = Hot(roles, speed)
    await found.meet()
    for name in ("a", "b"):
        for topic in range(topics):
            await found.serve(topic, name)
    return found


AB: dict[str, MemberRole] = {"a": "both", "b": "both"}
ABS: dict[str, MemberRole] = {**AB, "s": "store"}


# ---- start -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_restarted_engine_is_warm_before_it_is_picked() -> None:
    it = await busy(AB)
    await it.restart("b")
    member = it.members["b"]
    assert member.warming
    picked = [await it.serve(topic) for topic in (0, 1, 2)]
    assert {name for name, _ in picked} == {"a"}
    await it.until(lambda: not member.warming)
    assert it.metrics.tokens["start"] >= 3 * SHARED
    assert it.metrics.outcomes.keys() == {("start", "copied")}
    assert {(await it.serve(topic))[0] for topic in (0, 1)} == AB.keys()
    for topic in range(3):
        assert (await it.serve(topic, "b"))[1] == SHARED
    await it.end()


@in_virtual_time
async def test_without_warm_start_it_is_cold() -> None:
    it = await busy(AB)
    it.fleet.when_started = lambda _: None
    await it.restart("b")
    assert not it.members["b"].warming
    assert (await it.serve(0, "b"))[1] == 0
    await it.end()


@in_virtual_time
async def test_an_engine_restarted_under_traffic_computes_no_context_again() -> None:
    async def first_on_b(warm: bool) -> list[int]:
        """Eight clients ask without a pause while ``b`` restarts; return what its first answers found cached."""
        it, found = await busy(AB, topics=8), list[int]()
        if not warm:
            it.fleet.when_started = lambda _: None

        async def client(topic: int) -> None:
            while len(found) < 8:
                with suppress(TercetError):
                    name, cached = await it.serve(topic)
                    if name == "b" and it.members["b"].restarts:
                        found.append(cached)

        clients = [asyncio.ensure_future(client(topic)) for topic in range(8)]
        await asyncio.sleep(1)
        it.engines["b"].fail()
        it.fleet.health.lost(it.members["b"], Conflict("it is gone"))
        await asyncio.sleep(2)
        it.engines["b"].recover()
        it.members["b"].restarts = 1
        it.fleet.health.restarted("b")
        it.fleet.health.found_well(it.members["b"])
        await asyncio.gather(*clients)
        await it.until(lambda: not it.members["b"].warming)
        await it.end()
        return found[:8]

    assert await first_on_b(warm=True) == [SHARED] * 8
    assert 0 in await first_on_b(warm=False)


@pytest.mark.parametrize("roles", [{"b": "both"}, {"a": "prefill", "b": "decode"}, {"b": "both", "s": "store"}])
@in_virtual_time
async def test_an_engine_without_which_a_role_is_not_served_is_picked_at_once(roles: dict[str, MemberRole]) -> None:
    it = Hot(roles)
    await it.meet()
    await it.serve(0, "b")
    await it.restart("b")
    assert not it.members["b"].warming
    assert not it.metrics.outcomes
    await it.end()


@in_virtual_time
async def test_nothing_is_wanted_of_a_fleet_that_has_served_nothing_or_whose_others_have_other_weights() -> None:
    it = await busy(AB, topics=0)
    await it.restart("b")
    assert not it.members["b"].warming
    it = await busy(AB)
    it.members["b"].revision = (await it.engines["b"].status()).revision
    other = await busy(AB)
    other.members["a"].revision = type(other.members["a"].revision)("9", "9", "other")
    await other.restart("b")
    assert not other.members["b"].warming
    await it.end()
    await other.end()


@in_virtual_time
async def test_a_store_is_asked_first_and_one_that_stands_still_costs_half_the_time_alone() -> None:
    it = await busy(ABS)
    it.fleet.picking.note_routed(request_of_topic(0), ["s"])
    it.engines["s"].freeze()
    await it.restart("b")
    took = await it.until(lambda: not it.members["b"].warming)
    assert SECONDS / 2 <= took < SECONDS
    assert it.metrics.outcomes["start", "failed"] == 1
    assert it.metrics.tokens["start"] >= 3 * SHARED  # all from the other engine
    it.engines["s"].thaw()
    assert it.members["s"].reachable
    await it.end()


def request_of_topic(topic: int) -> Request:
    return Request(seq_id="t", prompt=tuple(range(topic * 10_000, topic * 10_000 + SHARED)))


@pytest.mark.parametrize(
    ("end", "bound"),
    [("the engine dies", SECONDS), ("the engine freezes", SECONDS), ("the source dies", 0.2), ("drained", 0.2),
     ("removed", 0.2)],
)  # fmt: skip
@in_virtual_time
async def test_a_warm_start_ends_in_time_however_it_ends(end: str, bound: float) -> None:
    it = await busy(AB, speed=300)
    a, b = it.members["a"], it.members["b"]
    await it.restart("b")
    assert b.warming
    await asyncio.sleep(0.5)
    assert b.warming
    match end:
        case "the engine dies":
            it.engines["b"].fail()
        case "the engine freezes":
            it.engines["b"].freeze()
        case "the source dies":
            it.engines["a"].fail()
            it.fleet.health.lost(a, Conflict("it is gone"))
        case "drained":
            it.fleet.drain("b")
        case _:
            it.fleet.remove("b")
    assert await it.until(lambda: not b.warming) <= bound
    it.engines["b"].thaw()
    await it.end()


@in_virtual_time
async def test_a_second_restart_begins_anew() -> None:
    it = await busy(AB, speed=2000)
    await it.restart("b")
    await asyncio.sleep(0.1)
    await it.restart("b")
    await it.until(lambda: not it.members["b"].warming)
    assert (await it.serve(0, "b"))[1] == SHARED
    await it.end()


@in_virtual_time
async def test_a_warm_start_is_bounded_in_time_and_tokens() -> None:
    it = await busy(AB, topics=8, speed=500)
    await it.restart("b")
    assert await it.until(lambda: not it.members["b"].warming) <= SECONDS + 0.11
    assert 0 < it.metrics.tokens["start"] < 8 * SHARED
    few = await busy(AB, topics=8)
    few.members["b"].kv_tokens = 2 * SHARED
    await few.restart("b")
    await few.until(lambda: not few.members["b"].warming)
    assert 0 < few.metrics.tokens["start"] <= SHARED
    await it.end()
    await few.end()


# ---- drain -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["drain", "sigterm"])
@in_virtual_time
async def test_a_leaving_engine_passes_on_what_no_other_has(how: str) -> None:
    it = await busy(ABS)
    await it.serve(7, "a")
    if how == "drain":
        it.fleet.drain("a")
    else:
        it.fleet.health.note_stopping(it.members["a"], True)
    await asyncio.sleep(0)
    await it.until(lambda: not it.members["a"].in_flight)
    assert it.metrics.tokens["drain"] >= 4 * SHARED
    (record,) = it.hot.since(0)
    assert record.to == {"s": Passed(it.metrics.outcomes["drain", "copied"], it.metrics.tokens["drain"])}
    assert (record.engine, record.dropped, record.rest, record.is_over) == ("a", {}, "", True)
    assert it.engines["s"].pool.free == it.engines["s"].pool.total
    held = it.metrics.outcomes.copy()
    it.fleet.drain("a", draining=how == "sigterm")
    it.fleet.health.note_stopping(it.members["a"], False)
    it.fleet.drain("a")  # the store has all of it now
    await asyncio.sleep(1)
    assert it.metrics.outcomes == held
    assert not any(each.to or each.dropped for each in it.hot.since(1))
    await it.end()


@in_virtual_time
async def test_without_a_store_it_goes_to_the_engine_with_the_most_room() -> None:
    it = await busy({**AB, "c": "both", "d": "both"})
    await it.serve(7, "a")
    await it.serve(7, "a")
    for name, usage in (("b", 0.5), ("c", 0.2), ("d", 0.9)):
        load = it.engines[name].load()
        load = type(load)(waiting=0, running=0, kv_usage=usage)
        it.fleet.knowledge.loads.report(name, load)
    it.fleet.drain("a")
    await asyncio.sleep(0)
    await it.until(lambda: not it.members["a"].in_flight)
    assert (await it.serve(7, "c"))[1] == SHARED
    assert (await it.serve(0, "c"))[1] == 0  # another engine has it
    await it.end()


@pytest.mark.parametrize("frozen", ["s", "a"])
@in_virtual_time
async def test_a_drain_is_never_held_up_for_longer_than_its_bound(frozen: str) -> None:
    it = await busy(ABS)
    it.engines[frozen].freeze()
    it.fleet.drain("a")
    await asyncio.sleep(0)
    assert it.members["a"].in_flight == 1
    assert await it.until(lambda: not it.members["a"].in_flight) <= SECONDS + 0.1
    assert not it.metrics.tokens["drain"]
    (record,) = it.hot.since(0)
    assert (record.to, record.is_over) == ({}, True)
    assert record.dropped == {"s: timeout": 3}  # their ends; what they share is at the other engine
    it.engines[frozen].thaw()
    await it.end()


@in_virtual_time
async def test_contexts_that_no_other_can_take_are_dropped_and_told_so() -> None:
    it = await busy(AB)
    await it.serve(7, "a")
    it.fleet.drain("b")
    it.fleet.drain("a")
    await it.until(lambda: all(each.is_over for each in it.hot.since(0)))
    dropped = {each.engine: each.dropped for each in it.hot.since(0)}
    assert dropped.keys() == {"a", "b"}
    assert dropped["a"]["no other can take them"] >= dropped["b"]["no other can take them"] >= 1
    await it.end()


@in_virtual_time
async def test_contexts_beyond_the_share_of_kv_are_not_tried_and_records_are_bounded() -> None:
    it = await busy({**AB, "c": "both"})
    for topic in range(4, 9):
        await it.serve(topic, "a")
    it.members["a"].kv_tokens = 2 * SHARED
    it.fleet.drain("a")
    await it.until(lambda: it.hot.since(0) and it.hot.since(0)[0].is_over)
    (record,) = it.hot.since(0)
    assert record.rest == "50% of its KV was sent"
    assert 0 < sum(each.tokens for each in record.to.values()) <= 2 * SHARED
    for _ in range(REMEMBERED):
        it.fleet.drain("a", draining=False)
        it.fleet.drain("a")
    assert [each.number for each in it.hot.since(0)] == [*range(2, REMEMBERED + 2)]
    await asyncio.sleep(SECONDS)
    assert all(each.is_over for each in it.hot.since(0))  # also those that never began
    await it.end()


@in_virtual_time
async def test_an_engine_that_stays_after_all_copies_nothing_more() -> None:
    it = await busy(ABS, speed=200)
    it.fleet.drain("a")
    await asyncio.sleep(0.5)
    it.fleet.drain("a", draining=False)
    await it.until(lambda: not it.members["a"].in_flight, 0.1)
    await it.end()


# ---- cancelled -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["start", "drain"])
def test_everything_is_given_back_at_a_cancellation_at_each_await(what: str) -> None:
    async def ended_after(turns: int) -> bool:
        """End the copies after so many turns of the loop; return whether they had ended by themselves."""
        it = await busy(ABS, topics=2)
        if what == "start":
            await it.restart("b")
        else:
            it.fleet.drain("a")
        for _ in range(turns):
            await asyncio.sleep(0.0005)
        over = not (it.members["b"].warming or it.members["a"].in_flight)
        await it.end()
        return over

    async def check() -> None:
        await ended_after(0)
        assert not await ended_after(1)
        for turns in range(2, 400):
            if await ended_after(turns):
                return
        pytest.fail("the copies never end")

    run_virtual(check())


def test_a_context_that_is_refused_costs_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        it = await busy(AB)
        refused, send = list[str](), it.engines["a"].remote_send

        async def remote_send(request: Request, *given: object, **named: object) -> object:
            if not refused:
                refused.append(request.seq_id)
                raise TercetError("not this one")
            return await send(request, *given, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(SimEngine, "remote_send", lambda _, *given, **named: remote_send(*given, **named))
        await it.restart("b")
        await it.until(lambda: not it.members["b"].warming)
        assert it.metrics.outcomes["start", "failed"] == 1
        assert it.metrics.outcomes["start", "copied"] > 1
        await it.end()

    run_virtual(check())


@in_virtual_time
async def test_what_a_tier_of_the_engine_has_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    it = await busy(AB)
    prepare = SimEngine.prep_recv

    @asynccontextmanager
    async def prep_recv(engine: SimEngine, *given: Any, **named: Any) -> AsyncGenerator[Reservation]:
        async with prepare(engine, *given, **named) as space:
            yield msgspec.structs.replace(space, tier_len=space.end)

    monkeypatch.setattr(SimEngine, "prep_recv", prep_recv)
    await it.restart("b")
    await it.until(lambda: not it.members["b"].warming)
    assert it.metrics.outcomes.keys() == {("start", "held")}
    await it.end()


async def test_a_context_moves_between_engines(router: LiveRouter) -> None:
    first, second = (member.name for member in router.fleet.members[:2])
    async with router.client() as client:
        body = {"prompt": list(range(64)), "source": first, "destination": second}
        answer = await client.post("/migrate_context", json=body)
    assert answer.status_code == 200
    assert (answer.json()["begin"], answer.json()["end"]) == (0, 64)
    assert [member.in_flight for member in router.fleet.members] == [0] * len(router.fleet.members)


async def test_a_context_moves_with_its_images(router: LiveRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []

    async def noted(fleet: object, prefix: Request, source: str, destination: str) -> None:
        asked.append(prefix)

    monkeypatch.setattr(admin_routes, "migrate_context", noted)
    image = {"modality": "image", "digest": "ab" * 32, "offset": 1, "length": 4, "data": "AAEC"}
    async with router.client() as client:
        body = {"prompt": list(range(8)), "source": "a", "destination": "b", "mm_features": [image]}
        answer = await client.post("/migrate_context", json=body)
        assert answer.status_code == 200
        wrong = await client.post("/migrate_context", json={**body, "mm_features": [{**image, "digest": "no"}]})
    (prefix,) = asked
    assert [(each.end, each.data) for each in prefix.mm_features] == [(5, b"\0\1\2")]
    assert wrong.status_code == 400
    assert "mm_features" in wrong.text


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": "text"}, 400, "prompt"),
        ({"source": "nobody"}, 404, "name"),
        ({"destination": None}, 400, "destination"),
        ({"cachesalt": "x"}, 400, None),
    ],
)
async def test_what_cannot_move_is_refused(
    router: LiveRouter, change: dict[str, object], status: int, param: str | None
) -> None:
    first, second = (member.name for member in router.fleet.members[:2])
    body = {"prompt": [1, 2], "source": first, "destination": second, **change}
    async with router.client() as client:
        answer = await client.post("/migrate_context", json=body)
    assert answer.status_code == status
    assert param is None or param in answer.text


def test_routes_are_counted_with_how_wrong_they_were(metrics: Metrics) -> None:
    option = RouteOption("d", ttft=0.5, tpot=0.01, cost=1.0)
    events = [TraceEvent("start_generate", "d")]
    metrics.finished(Trace(events=events, ttft=1.0, tpot=0.01, decision=RouteDecision("alone", option)))
    elsewhere = [TraceEvent("start_generate", "e")]
    metrics.finished(Trace(events=elsewhere, ttft=9.0, tpot=1.0, decision=RouteDecision("pair", option, explored=True)))
    metrics.finished(Trace(ttft=1.0))
    assert counted("tercet_routes_total", kind="alone", why="cheapest") == 1
    assert counted("tercet_routes_total", kind="pair", why="to_learn") == 1
    assert counted("tercet_route_prediction_ratio_sum", what="ttft") == pytest.approx(2.0)
    assert counted("tercet_route_prediction_ratio_count", what="tpot") == 1


def test_pulls_are_counted_by_what_came_of_the_belief(metrics: Metrics) -> None:
    events = [
        TraceEvent("remote_send", "d", end=end, cached=end, predicted=predicted, cached_only=True)
        for end, predicted in ((512, 512), (512, 560), (256, 512), (0, 512))
    ]
    failed = [TraceEvent("remote_send", "d", cached_only=True), TraceEvent("remote_send", "d")]
    metrics.finished(Trace(program="fetch", events=events, failed=failed))
    outcomes = {each: counted("tercet_pulls_total", outcome=each) for each in ("whole", "part", "nothing", "failed")}
    assert outcomes == {"whole": 2, "part": 1, "nothing": 1, "failed": 1}
    assert counted("tercet_pulled_tokens_total") == 1280
    assert counted("tercet_prefix_missing_tokens_total", program="fetch", engine="d") == 48 + 256 + 512


def test_what_was_predicted_and_delivered_is_counted_by_tier(metrics: Metrics) -> None:
    pick = PickEvent(0.0, "both", "p", "d", predicted=1000, tiers={"gpu": 600, "cpu": 400})
    events = [TraceEvent("start_generate", "d", end=1200, predicted=1000, cached=cached) for cached in (1000, 700, 500)]
    for event in events:
        metrics.finished(Trace(program="p", picks=[pick], events=[event]))
    found = {
        (tier, what): counted("tercet_prefix_tier_tokens_total", tier=tier, what=what)
        for tier in ("gpu", "cpu") for what in ("predicted", "delivered")
    }  # fmt: skip
    assert found == {
        ("gpu", "predicted"): 1800, ("gpu", "delivered"): 1700, ("cpu", "predicted"): 1200, ("cpu", "delivered"): 500,
    }  # fmt: skip
