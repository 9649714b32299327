"""Tercet's part of this engine's ``/metrics``: what the agents count, as the probe of its life brings it."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import REGISTRY, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tercet.vllm_plugin.engine.liveness_probe import LivenessProbe

NOW = {
    "connections": "Connections from senders that are open.",
    "sessions_in": "Senders that are connected.",
    "sessions_out": "Receivers that this rank is connected to.",
    "sends_active": "Sends under way.",
    "leases_open": "Leases under which KV may arrive.",
    "receives_active": "Sends of peers that have begun to arrive.",
}
TOTALS = {
    "bytes_sent": "KV bytes sent.",
    "chunks_sent": "Chunks of KV sent.",
    "sends_done": "Sends that were acknowledged.",
    "sends_failed": "Sends that failed or were cancelled.",
    "sessions_lost": "Sessions with receivers that broke or were closed.",
    "bytes_received": "KV bytes received.",
    "chunks_received": "Chunks of KV received.",
    "chunks_refused": "Chunks of KV refused, most of them late.",
    "receives_done": "Sends of peers that are in place.",
    "receives_refused": "Sends of peers that lacked something.",
    "receives_dropped": "Sends of peers that were forgotten half-way.",
    "connections_refused": "Connections that broke the protocol, did not know the secret, or were too many.",
}

leases_expired = Counter("tercet_leases_expired", "Reservations that nobody used in time.")
fences_open = Gauge("tercet_fences_open", "Leases and sends that are over, whose blocks wait for an agent's answer.")
leases_aborted = Counter("tercet_leases_aborted", "Reservations that an abort ended.")
sends_aborted = Counter("tercet_sends_aborted", "Sends that an abort, or their client's going away, ended.")

sends_bypassing = Counter("tercet_sends_bypassing_core", "Sends of running sequences while the core stood still.")


class ProbeCollector(Collector):
    """What the engine's processes answered last. A scrape asks nobody: it runs on the API server's event loop."""

    def __init__(self, probe: LivenessProbe) -> None:
        self._probe = probe

    def collect(self) -> Iterable[Metric]:
        """See ``prometheus_client``'s ``Collector``."""
        stalled = GaugeMetricFamily("tercet_stalled_seconds", "For how long a process of this engine has stood still.")
        stalled.add_metric([], self._probe.stalled_s)
        yield stalled
        for kind, names in ((GaugeMetricFamily, NOW), (CounterMetricFamily, TOTALS)):
            for name, meaning in names.items():
                family = kind(f"tercet_kv_{name}", meaning, labels=["rank"])
                for rank, counters in enumerate(self._probe.agent_counters):
                    family.add_metric([str(rank)], counters.get(name, 0))
                yield family


def export(probe: LivenessProbe) -> None:
    """Add them to ``/metrics``; relies on vLLM serving ``prometheus_client``'s own registry."""
    REGISTRY.register(ProbeCollector(probe))
