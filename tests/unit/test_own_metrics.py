"""The metrics of one test: none is left for the next one, whatever happened."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY, Counter, Gauge
from prometheus_fastapi_instrumentator import Instrumentator
from prometheus_fastapi_instrumentator.middleware import PrometheusInstrumentatorMiddleware
from starlette.applications import Starlette

from tests.own_metrics import own_metrics


def names() -> set[str]:
    return set(REGISTRY._names_to_collectors)


def counts_requests() -> bool:
    """Build an application as vLLM does. Return True if its layers count requests."""
    app = Starlette()
    Instrumentator().add().instrument(app)
    layer = app.build_middleware_stack()
    while not isinstance(layer, PrometheusInstrumentatorMiddleware):
        layer = layer.app  # type: ignore[attr-defined]
    return bool(layer.instrumentations)


def test_nothing_is_left() -> None:
    before = names()
    with own_metrics():
        Counter("tercet_of_one_test", "Of one test.")
        assert names() > before
    assert names() == before


def test_nothing_is_left_by_a_start_that_fails() -> None:
    def start() -> None:
        with own_metrics():
            Counter("tercet_of_one_test", "Of one test.")
            raise ValueError("no start")

    before = names()
    with pytest.raises(ValueError, match="no start"):
        start()
    assert names() == before


def test_an_application_counts_requests_after_one_that_left_its_metrics() -> None:
    with own_metrics():
        assert counts_requests()
        kept = names()
        assert not counts_requests()  # of the same names
        with own_metrics():
            assert counts_requests()
        assert names() == kept


def test_other_metrics_stay_registered() -> None:
    with own_metrics():
        Gauge("tercet_of_a_process", "Of a process.")
        with own_metrics():
            assert "tercet_of_a_process" in names()
