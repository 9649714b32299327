"""What a router tells a planner: requests by times, lengths and blocks, engines, and no text."""

from __future__ import annotations

import pytest

from tercet.fleet.policy_views import BLOCK, SeenRequests, block_names
from tercet.settings.fleet_settings import Objectives
from tercet_planner.live_planner import TrafficView, read_traffic

from .conftest import LiveRouter


async def test_requests_are_seen_from_the_first_question_on(router: LiveRouter) -> None:
    async with router.client() as client:
        await router.ask()
        first = (await client.get("/traffic")).json()
        assert first["arrivals"] == []
        assert first["program"] == "disaggregated"
        assert {each["name"]: each["role"] for each in first["engines"]} == {"p": "prefill", "d": "decode"}
        await router.ask()
        await router.ask()
        answer = await client.get("/traffic?window=30")
    found = read_traffic(answer.json())
    assert found.processes == 1
    assert len(found.arrivals) == 2
    view = TrafficView()
    view.heard(found)
    one, other = view.observed().arrivals
    assert found.since <= one.at <= other.at <= found.now
    assert one.ended
    assert one.prompt_tokens > 0
    assert one.output_tokens > 0
    assert one.met is True
    assert 'prompt"' not in answer.text


@pytest.mark.parametrize("window", ["0", "x", "-1", "nan", "601"])
async def test_a_window_that_is_none_is_named(router: LiveRouter, window: str) -> None:
    async with router.client() as client:
        answer = await client.get(f"/traffic?window={window}")
    assert answer.status_code == 400
    assert "window" in answer.json()["error"]["message"]


def test_equal_beginnings_have_equal_blocks() -> None:
    prompt = list(range(3 * BLOCK + 7))
    names = block_names(prompt)
    assert len(names) == 3
    assert block_names(prompt[: 2 * BLOCK]) == names[:2]
    assert block_names([1, *prompt[1:]])[2] != names[2]
    assert block_names(prompt[: BLOCK - 1]) == ()


def test_what_left_the_window_is_forgotten() -> None:
    seen = SeenRequests(10.0, Objectives(), lambda: 0.0)
    assert seen.arrivals(100.0) == ()


async def test_a_planner_reports_and_the_last_report_is_shown(router: LiveRouter) -> None:
    plan = {"at": 1.0, "fleet": "1P1D", "wanted": "1P2D", "reason": "it grows", "steps": ["start one to decode"]}
    told = {"act": "advise", "planner": "simulate", "interval": 15.0, "margin": 0.1, "plans": [plan]}
    async with router.client() as client:
        assert (await client.get("/planner")).json() is None
        assert (await client.put("/planner", json=told)).status_code == 200
        shown = (await client.get("/planner")).json()
        refused = await client.put("/planner", json={**told, "mood": "good"})
    assert shown["plans"] == [{**plan, "expected": None, "ttft_p99": None, "came": None, "proposal": ""}]
    assert refused.status_code == 400
    assert "mood" in refused.json()["error"]["message"]
