"""Records become numbers: the formulas, what counts as a failure, and who is left out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet_lab.bench.results import Distribution, most_at_once, summarize
from tercet_lab.slo import Slo
from tercet_lab.tables import RequestRow, Requests

FLAT = (
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "max_concurrent_requests",
)  # fmt: skip
times = st.floats(0, 1e5, allow_nan=False)


def record(index: int = 0, *, scheduled: float = 0.0, sent: float | None = None, **rest: Any) -> RequestRow:
    """A request of three tokens, due at ``scheduled``: TTFT 1 s, TPOT 0.5 s, E2EL 2 s after the send."""
    at = scheduled if sent is None else sent
    fields: dict[str, Any] = {
        "token_times": (at + 1.0, at + 1.5, at + 2.0), "first_token": at + 1.0, "ended": at + 2.0, "input_tokens": 10,
        "output_tokens": 3, **rest,
    }  # fmt: skip
    return RequestRow(id=index, scheduled=scheduled, sent=at, **fields)


def failed(index: int = 0, kind: str = "http", **rest: Any) -> RequestRow:
    return record(index, first_token=None, token_times=(), output_tokens=0, failure=kind, error="no", **rest)


def test_one_request() -> None:
    one = record()
    table = Requests.of_rows([one])
    assert (one.ok, table.ttft[0], table.e2el[0], table.tpot[0], list(table.itl)) == (True, 1.0, 2.0, 0.5, [0.5, 0.5])
    found = summarize([one])
    assert (found.completed, found.failed, found.duration, found.request_throughput) == (1, 0, 2.0, 0.5)
    assert (found.output_throughput, found.total_token_throughput) == (1.5, 6.5)
    assert found.ttft is not None
    assert found.ttft.p99 == 1.0


def test_latency_from_the_scheduled_arrival_contains_the_delay_of_the_send() -> None:
    found = summarize([record(sent=0.25)])
    assert found.ttft
    assert found.ttft_scheduled
    assert found.e2el_scheduled
    assert found.send_delay
    assert (found.ttft.mean, found.ttft_scheduled.mean, found.e2el_scheduled.mean) == (1.0, 1.25, 2.25)
    assert found.send_delay.mean == 0.25


def test_failures_count_and_have_no_latency() -> None:
    found = summarize([record(0), failed(1), failed(2, "timeout"), failed(3, "interrupted")])
    assert (found.completed, found.failed, found.interrupted) == (1, 2, 1)
    assert found.errors == {"http": 1, "interrupted": 1, "timeout": 1}
    assert found.ttft is not None
    assert found.ttft.count == 1


def test_a_stream_that_broke_off_counts_as_failed_though_it_had_tokens() -> None:
    found = summarize([record(failure="disconnected", error="gone")])
    assert (found.completed, found.failed, found.ttft, found.itl, found.total_output_tokens) == (0, 1, None, None, 0)


def test_an_answer_without_a_token_is_a_failure() -> None:
    found = summarize([record(first_token=None, token_times=(), output_tokens=0)])
    assert (found.completed, found.failed, found.errors) == (0, 1, {"empty": 1})


def test_warm_up_is_left_out() -> None:
    found = summarize([record(0, scheduled=0.0, warmup=True), record(1, scheduled=5.0)])
    assert (found.completed, found.duration) == (1, 2.0)


def test_no_requests_at_all() -> None:
    found = summarize([], Slo(ttft=0.001))
    assert (found.completed, found.failed, found.duration, found.request_goodput, found.ttft) == (0, 0, 0.0, 0.0, None)
    assert "mean_ttft_ms" not in found.flat()


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(), 2),
        (Slo(ttft=1.0), 1),  # the second was sent late, and that counts
        (Slo(ttft=1.1), 2),
        (Slo(tpot=0.499), 0),
        (Slo(tpot=0.5, e2el=2.0), 1),
        (Slo(e2el=1.999), 0),
    ],
)
def test_goodput(slo: Slo, good: int) -> None:
    run = [record(0), record(1, sent=0.1), failed(2)]
    found = summarize(run, slo)
    assert found.request_goodput is not None
    assert found.request_goodput * found.duration == pytest.approx(good)


def test_one_token_answers_have_no_tpot_and_keep_any() -> None:
    one = record(output_tokens=1, ended=1.0, token_times=(1.0,))
    found = summarize([one], Slo(tpot=0.000001))
    assert (found.tpot, found.request_goodput) == (None, 1.0)
    assert math.isnan(Requests.of_rows([one]).tpot[0])


def test_flat_names_are_those_of_vllm_bench_serve() -> None:
    flat = summarize([record()], Slo(ttft=1.0)).flat()
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{key}_{name}_ms" for key in ("mean", "median", "std", "p90", "p99")} <= set(flat)
    assert set(FLAT) <= set(flat)
    assert flat["mean_tpot_ms"] == 500.0


@given(st.lists(times, min_size=1))
def test_a_distribution_is_ordered_and_within_its_values(values: list[float]) -> None:
    found = Distribution.of(values)
    assert found is not None
    assert min(values) <= found.p50 <= found.p90 <= found.p99 <= found.max == max(values)
    assert math.isclose(found.mean, sum(values) / len(values), rel_tol=1e-9, abs_tol=1e-9)


@given(st.lists(st.tuples(times, times).map(sorted)))
def test_most_at_once_is_what_counting_at_every_begin_finds(spans: list[list[float]]) -> None:
    spans = [span for span in spans if span[0] < span[1]]
    slow = max((sum(b <= begin < e for b, e in spans) for begin, _ in spans), default=0)
    begins, ends = (np.array([span[side] for span in spans], dtype=np.float64) for side in (0, 1))
    assert most_at_once(begins, ends) == slow


@given(st.lists(st.tuples(times, st.floats(0, 10), st.booleans()), max_size=30))
def test_every_request_is_counted_once(given_requests: list[tuple[float, float, bool]]) -> None:
    run = [
        record(i, scheduled=at, sent=at + late) if fine else failed(i, scheduled=at, ended=at)
        for i, (at, late, fine) in enumerate(given_requests)
    ]
    found = summarize(run)
    assert found.completed + found.failed + found.interrupted == len(run)
    assert sum(found.errors.values()) == found.failed
    assert Requests.of_rows(run).itl.size == 2 * found.completed


def test_a_generated_run_has_the_numbers_that_numpy_finds() -> None:
    chance = np.random.default_rng(5)
    run: list[RequestRow] = []
    for index in range(200):
        sent = index * 0.1 + chance.random() / 100
        at = sent + 0.1 + np.cumsum(chance.gamma(2, 0.02, size=chance.integers(1, 30)))
        run.append(
            record(
                index, scheduled=index * 0.1, sent=sent, token_times=tuple(at), first_token=at[0], ended=at[-1],
                output_tokens=len(at), input_tokens=int(chance.integers(1, 99)),
            )
        )  # fmt: skip
    run += [failed(200, ended=30.0), record(201, warmup=True)]
    flat = summarize(run, Slo(ttft=0.2, tpot=0.04)).flat()
    good = run[:200]
    ttft = np.array([one.token_times[0] - one.sent for one in good])
    e2el = np.array([one.ended - one.sent for one in good])
    longer = [one for one in good if one.output_tokens > 1]
    tpot = np.array([(one.ended - one.token_times[0]) / (one.output_tokens - 1) for one in longer])
    itl = np.concatenate([np.diff(one.token_times) for one in good])
    for name, values in (("ttft", ttft), ("e2el", e2el), ("tpot", tpot), ("itl", itl)):
        expected = {
            "mean": np.mean(values), "std": np.std(values), "median": np.median(values),
            "p90": np.percentile(values, 90), "p99": np.percentile(values, 99), "max": np.max(values),
        }  # fmt: skip
        for key, value in expected.items():
            assert flat[f"{key}_{name}_ms"] == pytest.approx(value * 1000), (key, name)
    assert flat["duration"] == pytest.approx(30.0)
    assert flat["output_throughput"] == pytest.approx(sum(one.output_tokens for one in good) / 30.0)
    slow = Requests.of_rows(good).tpot > 0.04
    kept = sum(one.token_times[0] - one.scheduled <= 0.2 and not late for one, late in zip(good, slow, strict=True))
    assert 0 < kept < 200
    assert flat["request_goodput"] == pytest.approx(kept / 30.0)
