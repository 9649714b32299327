"""What a router counts: predictions against caches, and pairs of engines."""

from __future__ import annotations

import pytest

from tercet.fleet import Trace
from tercet.protocol.spans import TraceEvent
from tercet.router.observe.metrics import MOST_PAIRS, OTHER_ENGINES, Metrics
from tercet.wire import SECONDS

from .conftest import counted, series


def test_what_was_predicted_and_found_is_counted_by_program_and_engine(metrics: Metrics) -> None:
    first = TraceEvent("prep_recv", "d", predicted=100, cached=64)
    second = TraceEvent("remote_send", "p", predicted=32, cached=96)
    metrics.finished(Trace("disaggregated", [first, second, TraceEvent("start_generate", "d", cached=64)]))
    metrics.finished(Trace("disaggregated", [first]))

    def tokens(what: str, engine: str) -> float:
        return counted(f"tercet_prefix_{what}_tokens_total", program="disaggregated", engine=engine)

    assert [tokens(what, "d") for what in ("predicted", "delivered", "missing")] == [200, 128, 72]
    assert [tokens(what, "p") for what in ("predicted", "delivered", "missing")] == [32, 96, 0]


@pytest.mark.slow
def test_pairs_of_engines_are_bounded_and_no_byte_is_lost(metrics: Metrics) -> None:
    for number in range(MOST_PAIRS + 10):
        metrics.finished(Trace("p", [TraceEvent("remote_send", "a", bytes=2, to=f"d{number}")]))
    pairs = [labels for name, labels in series() if name == "tercet_kv_sent_bytes_total"]
    assert len(pairs) == MOST_PAIRS + 1
    assert counted("tercet_kv_sent_bytes_total", engine="a", to=OTHER_ENGINES) == 20
    metrics.finished(Trace("p", [TraceEvent("remote_send", "a", bytes=2, to="d0")]))
    assert counted("tercet_kv_sent_bytes_total", engine="a", to="d0") == 4


def test_buckets_reach_from_a_millisecond_to_ten_minutes(metrics: Metrics) -> None:
    assert (SECONDS[0], SECONDS[-1]) == (0.001, 600)
    metrics.finished(Trace("p", [], ttft=0.0008, tpot=300.0))
    assert counted("tercet_ttft_seconds_bucket", program="p", le="0.001") == 1
    assert counted("tercet_tpot_seconds_bucket", program="p", le="120.0") == 0
    assert counted("tercet_tpot_seconds_bucket", program="p", le="300.0") == 1
