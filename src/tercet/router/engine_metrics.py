"""What engines last reported, on ``/metrics``: read when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from tercet.fleet import EngineFleet

GAUGES = {
    "waiting": "Requests that wait, as the engine last reported.",
    "running": "Requests that run, as the engine last reported.",
    "kv_usage": "Share of the KV cache in use, as the engine last reported.",
    "tokens": "Tokens still to work on, as the engine last reported.",
    "step_time": "Seconds of recent steps, as the engine last reported.",
}


class EngineCollector(Collector):
    """Gauges by engine. One that has reported nothing has none; its age says how old a report is, in seconds."""

    def __init__(self, fleet: EngineFleet) -> None:
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


_exported: list[EngineCollector] = []


def export(fleet: EngineFleet) -> None:
    """Add the gauges to ``/metrics``; relies on vLLM serving ``prometheus_client``'s own registry."""
    collector = EngineCollector(fleet)
    REGISTRY.register(collector)
    _exported.append(collector)


def of_all_workers() -> CollectorRegistry:
    """What all workers of a front door have counted, and the gauges: each worker hears every engine, so once.

    vLLM's own ``/metrics`` serves what the workers write to files, and so lacks what is read when somebody asks.
    """
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    for collector in _exported:
        registry.register(collector)
    return registry
