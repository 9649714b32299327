"""Metrics of engines' last reports, for the ``/metrics`` page of routers and endpoint pickers."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tercet.fleet.engine_fleet import EngineFleet

GAUGES = {
    "waiting": ("waiting", "Requests that wait, as the engine last reported."),
    "running": ("running", "Requests that run, as the engine last reported."),
    "kv_usage": ("kv_usage_ratio", "Share of the KV cache in use, as the engine last reported."),
    "tokens": ("tokens", "Tokens still to work on, as the engine last reported."),
    "step_time": ("step_seconds", "Duration of recent steps, as the engine last reported."),
}
"""By field of an :class:`~tercet.protocol.EngineLoad`: the metric's name after ``tercet_engine_``, and its meaning."""


class EngineCollector(Collector):
    """Gauges by engine; an engine without a report, or that does not answer, has only the gauge ``tercet_engine_up``.

    The age of a report is in seconds.
    """

    def __init__(self, fleet: EngineFleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        up_now = [member.name for member in self._fleet.members if member.reachable]
        found = {name: self._fleet.knowledge.loads.last(name) for name in up_now}
        reports = {name: report for name, report in found.items() if report is not None}
        ages = GaugeMetricFamily(
            "tercet_engine_report_age_seconds", "Time since the engine's last report.", labels=["engine"]
        )
        for name, (_, age) in reports.items():
            ages.add_metric([name], age)
        yield ages
        up = GaugeMetricFamily(
            "tercet_engine_up", "1 if the engine answers and makes progress, 0 if not.", labels=["engine"]
        )
        for member in self._fleet.members:
            up.add_metric([member.name], member.reachable)
        yield up
        for field, (metric, meaning) in GAUGES.items():
            gauge = GaugeMetricFamily(f"tercet_engine_{metric}", meaning, labels=["engine"])
            for name, (load, _) in reports.items():
                value: float | None = getattr(load, field)
                if value is not None:
                    gauge.add_metric([name], value)
            yield gauge

    def describe(self) -> Iterable[Metric]:
        """Return no metrics: the registry need not collect at registration."""
        return ()
