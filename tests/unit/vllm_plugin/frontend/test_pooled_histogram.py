"""Histograms that add values together have the same samples as those of ``prometheus_client``."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from vllm.v1.metrics.loggers import PrometheusStatLogger

from tercet.vllm_plugin.fast_path.pooled_histogram import PooledHistogram, pool_gaps

BOUNDS = (0.01, 0.025, 0.05, 1.0)
NAMES = (f"gaps_{number}" for number in itertools.count())


def histogram() -> Histogram:
    return Histogram(next(NAMES), "Gaps.", buckets=BOUNDS, registry=CollectorRegistry())


def samples(found: Histogram) -> list[tuple[dict[str, str], float]]:
    return [
        (dict(sample.labels), sample.value)
        for metric in found.collect()
        for sample in metric.samples
        if not sample.name.endswith("_created")
    ]


@given(st.lists(st.lists(st.sampled_from([0.0, *BOUNDS, 0.02, 3.0]) | st.floats(0, 100), max_size=20), max_size=4))
def test_the_samples_are_the_same(passes: list[list[float]]) -> None:
    alone, together = histogram(), histogram()

    async def observe() -> None:
        pooled = PooledHistogram(together)
        for values in passes:
            for value in values:
                pooled.observe(value)
            await asyncio.sleep(0)

    asyncio.run(observe())
    for value in itertools.chain(*passes):
        alone.observe(value)
    assert [(labels, pytest.approx(value)) for labels, value in samples(alone)] == samples(together)


def test_only_gaps_of_the_prometheus_logger_are_pooled() -> None:
    logger = PrometheusStatLogger.__new__(PrometheusStatLogger)
    own, other = histogram(), object()
    logger.histogram_inter_token_latency = {0: own, 1: other}  # type: ignore[assignment]
    pool_gaps(SimpleNamespace(stat_loggers=[object(), logger]))
    assert isinstance(logger.histogram_inter_token_latency[0], PooledHistogram)
    assert logger.histogram_inter_token_latency[1] is other
