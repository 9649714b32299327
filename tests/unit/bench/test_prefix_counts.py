"""Prefix tokens predicted and found during a run, as the target's counters say."""

from __future__ import annotations

import pytest
from aiohttp import web

from tercet_bench.experiment import between, prefix_counts, words
from tests.servers import served

TEXT = """# TYPE tercet_prefix_predicted_tokens counter
tercet_prefix_predicted_tokens_total{program="a",engine="e0"} 100.0
tercet_prefix_predicted_tokens_total{program="a",engine="e1"} 28.0
# TYPE tercet_prefix_delivered_tokens counter
tercet_prefix_delivered_tokens_total{program="a",engine="e0"} 64.0
# TYPE tercet_prefix_missing_tokens counter
tercet_prefix_missing_tokens_total{program="a",engine="e0"} 64.0
tercet_prefix_other_tokens_total 9.0
"""


async def counts_of(text: str, status: int = 200) -> dict[str, int]:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=text, status=status)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with served(app) as url:
        return await prefix_counts(f"{url}/")


async def test_counters_are_summed_over_engines() -> None:
    assert await counts_of(TEXT) == {"predicted": 128, "delivered": 64, "missing": 64}


@pytest.mark.parametrize(("text", "status"), [(TEXT, 404), ("", 200), ("{{ no metrics", 200)])
async def test_another_server_has_none(text: str, status: int) -> None:
    assert await counts_of(text, status) == {}


async def test_a_server_that_does_not_answer_has_none() -> None:
    assert await prefix_counts("http://127.0.0.1:1") == {}


def test_a_run_has_what_was_counted_during_it() -> None:
    after = {"predicted": 128, "delivered": 64, "missing": 64}
    assert between({}, after) == after
    assert between({"predicted": 100, "delivered": 64, "missing": 64}, after) == {
        "predicted": 28, "delivered": 0, "missing": 0,
    }  # fmt: skip
    assert between(after, after) == {}
    assert between({"predicted": 200}, after) == {}, "the router was restarted"


def test_a_report_says_the_share_that_was_missing() -> None:
    said = words({"predicted": 200, "delivered": 150, "missing": 50})
    assert said == (
        "picks predicted 200 prefix tokens in caches, engines found 150, 50 of the predicted (25%) were missing"
    )
    assert "missing" not in words({"predicted": 0, "delivered": 5, "missing": 0})
