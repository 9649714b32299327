"""Context migration over HTTP, and the metrics of routes."""

from __future__ import annotations

import pytest

from tercet.decisions.cost import RouteDecision, RouteOption
from tercet.fleet import Trace
from tercet.protocol import Request
from tercet.protocol.spans import PickEvent, TraceEvent
from tercet.router.admin import admin_routes
from tercet.router.observe.metrics import Metrics

from .conftest import LiveRouter, counted


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
