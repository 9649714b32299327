"""Tercet's part of this engine's ``/metrics``: the agents' counters, which the liveness probe reads."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tercet.engine.liveness_probe import LivenessProbe

NOW = {
    "connections": "Open connections from senders.",
    "sessions_in": "Connected senders.",
    "sessions_out": "Receivers to which this rank is connected.",
    "sends_active": "Running sends.",
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
    "receives_done": "Sends of peers that arrived completely.",
    "receives_refused": "Sends of peers that were incomplete.",
    "receives_dropped": "Sends of peers that were dropped before their end.",
    "connections_refused": "Connections that violated the protocol, did not know the secret, or exceeded the limit.",
}

leases_expired = Counter("tercet_leases_expired", "Reservations that were not used in time.")
fences_open = Gauge("tercet_fences_open", "Ended leases and sends whose blocks wait for an agent's answer.")
leases_aborted = Counter("tercet_leases_aborted", "Reservations that an abort ended.")
sends_aborted = Counter("tercet_sends_aborted", "Sends that an abort, or their client's disconnect, ended.")

sends_bypassing = Counter("tercet_sends_bypassing_core", "Sends of running sequences while the core was stuck.")


class ProbeCollector(Collector):
    """A collector of the last answers of the engine's processes.

    A scrape calls no process, since it runs on the API server's event loop.
    """

    def __init__(self, probe: LivenessProbe) -> None:
        self._probe = probe

    def collect(self) -> Iterable[Metric]:
        stalled = GaugeMetricFamily(
            "tercet_stalled_seconds", "Seconds since the last progress of a process of this engine."
        )
        stalled.add_metric([], self._probe.stalled_s)
        yield stalled
        for kind, names in ((GaugeMetricFamily, NOW), (CounterMetricFamily, TOTALS)):
            for name, meaning in names.items():
                family = kind(f"tercet_kv_{name}", meaning, labels=["rank"])
                for rank, counters in enumerate(self._probe.agent_counters):
                    family.add_metric([str(rank)], counters.get(name, 0))
                yield family
