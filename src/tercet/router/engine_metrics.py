"""What engines last reported, on ``/metrics``: read when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tercet.fleet import Fleet

GAUGES = {
    "waiting": "Requests that wait, as the engine last reported.",
    "running": "Requests that run, as the engine last reported.",
    "kv_usage": "Share of the KV cache in use, as the engine last reported.",
    "tokens": "Tokens still to work on, as the engine last reported.",
    "step_time": "Seconds of recent steps, as the engine last reported.",
}


class EngineCollector(Collector):
    """Gauges by engine. One that has reported nothing has none; its age says how old a report is, in seconds."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        """See ``prometheus_client``'s ``Collector``."""
        found = {member.name: self._fleet.knowledge.loads.last(member.name) for member in self._fleet.members}
        reports = {name: report for name, report in found.items() if report is not None}
        ages = GaugeMetricFamily(
            "tercet_engine_report_age_seconds", "Time since the engine's last report.", labels=["engine"]
        )
        for name, (_, age) in reports.items():
            ages.add_metric([name], age)
        yield ages
        for field, meaning in GAUGES.items():
            gauge = GaugeMetricFamily(f"tercet_engine_{field}", meaning, labels=["engine"])
            for name, (load, _) in reports.items():
                value: float | None = getattr(load, field)
                if value is not None:
                    gauge.add_metric([name], value)
            yield gauge

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry need not ask at registration."""
        return ()


def export(fleet: Fleet) -> None:
    """Add the gauges to ``/metrics``; relies on vLLM serving ``prometheus_client``'s own registry."""
    REGISTRY.register(EngineCollector(fleet))
