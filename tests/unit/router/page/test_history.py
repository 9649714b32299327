"""The last minutes of a router, which are kept while no page is open, and those of several workers as one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from tercet.protocol import EngineLoad, TercetError
from tercet.router.observe.request_traces import RequestTraces, SharedTraces
from tercet.router.page import watch
from tercet.router.page.records import FleetPoint, reported_loads
from tercet.router.page.watch import KEPT, SECONDS, History, RecentRates, joined, rates_of
from tests.clock import Clock
from tests.longest_wait import until
from tests.unit.router.conftest import LiveRouter

from .test_page_app import CLIENT, app_of, bearer, client_of
from .test_viewers import NAMES, did


def history_of(router: LiveRouter, clock: Clock) -> History:
    return History(router.service, reported_loads(router.fleet), clock)


async def test_a_point_has_what_happened_since_the_last_one(router: LiveRouter) -> None:
    clock = Clock(1000.0)
    kept = history_of(router, clock)
    router.service.observers.append(kept)
    await router.ask()
    router.service.metrics.refused.labels("queue_full").inc(3)
    router.service.metrics.refused.labels("client_left").inc(2)
    router.fleet.report("d", EngineLoad(waiting=3, running=2, kv_usage=0.25, step_time=0.0125))
    clock.now += 5
    kept.take()
    for name in ("p", "d"):
        router.fleet.remove(name)
    with suppress(TercetError):
        await router.ask()
    clock.now += 5
    kept.take()
    first, second = kept.points()
    assert (first.t, first.seconds, first.running, first.waiting) == (1005.0, 5.0, 2, 3)
    assert (first.programs["disaggregated"].done, first.failed, first.refused) == (1, 0, 3)
    assert (second.t, second.failed, second.refused, second.running) == (1010.0, 1, 0, 0)
    for _ in range(2 * KEPT):
        clock.now += 5
        kept.take()
    assert len(kept.points()) == KEPT


async def test_points_come_by_themselves_at_multiples_of_the_interval(
    router: LiveRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SECONDS", 0.05)
    loop = asyncio.get_running_loop()
    kept = History(router.service, reported_loads(router.fleet), loop.time)
    kept.begin()
    await until(lambda: len(kept.points()) >= 3)


async def test_a_timer_that_fires_early_makes_no_point_of_a_millisecond(
    router: LiveRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SECONDS", 0.2)
    loop = asyncio.get_running_loop()
    call_later = loop.call_later
    # As uvloop does, whose timers have whole milliseconds.
    monkeypatch.setattr(loop, "call_later", lambda delay, call, *more: call_later(max(0, delay - 0.005), call, *more))
    kept = History(router.service, reported_loads(router.fleet), loop.time)
    kept.begin()
    await until(lambda: len(kept.points()) >= 4)
    assert all(point.seconds > 0.1 for point in kept.points()[1:])


def at(t: float, done: int, running: int = 0, failed: int = 0) -> FleetPoint:
    return FleetPoint(t, SECONDS, running, 0, {"a": did(done, 10, 20.0)}, failed, 1)


def test_workers_are_joined_by_time() -> None:
    mine, theirs = [at(1000.0, 1, 4), at(1005.01, 2, 5, 1)], [at(1005.4, 3, 5, 2), at(1010.0, 4, 6)]
    found = joined([mine, theirs, []])
    assert [(point.t, point.programs["a"].done, point.running, point.failed, point.refused) for point in found] == [
        (1000.0, 1, 4, 0, 1), (1005.4, 5, 5, 3, 2), (1010.0, 4, 6, 0, 1),
    ]  # fmt: skip
    assert len(joined([[at(5.0 * number, 1) for number in range(2 * KEPT)]])) == KEPT
    assert joined([]) == []


def test_rates_are_of_the_last_ten_seconds() -> None:
    found = rates_of([at(1000.0, 100), at(1005.0, 1, failed=2), at(1010.0, 4)])
    assert found == RecentRates(10.0, 0.5, 2.0, 0.2, 0.2, 0.02)
    assert rates_of([]) is None


async def test_the_status_of_a_router_has_its_rates(router: LiveRouter) -> None:
    app = app_of(router)
    router.shared.traces.history = lambda: [at(1000.0, 5)]
    async with client_of(app) as client:
        found = (await client.get("/tercet/v1/status")).json()
    assert found["recent"]["requests"] == 1.0
    assert (found["engines"][0]["restarts"], found["engines"][0]["log"]) == (0, "")


async def test_the_route_needs_a_key_of_the_page_and_asks_the_other_workers(router: LiveRouter) -> None:
    name = f"history-{next(NAMES)}"

    async def others() -> Sequence[str]:
        return [name]

    other = SharedTraces(RequestTraces(1, router.service.moves.numbered), name)
    other.history = lambda: [at(1000.0, 7)]
    router.shared.traces._others = others
    app: Any = app_of(router, keys=(CLIENT,))
    async with other.answering(), client_of(app) as client:
        assert (await client.get("/tercet/history")).status_code == 401
        answer = await client.get("/tercet/history", headers=bearer(CLIENT))
    assert answer.status_code == 200
    found = answer.json()
    assert found["seconds"] == SECONDS
    assert msgspec.convert(found["points"], list[FleetPoint]) == [at(1000.0, 7)]
