"""Tercet's part of this engine's ``/metrics``: what the agents count, read when somebody asks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from prometheus_client import REGISTRY, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tercet.protocol import EngineError
from tercet.transport import ControlClient, ReadCounters

logger = logging.getLogger(__name__)
# A scrape runs on the API server's event loop, so a stuck agent must not hold it for long.
ANSWER_SECONDS = 0.5
NOW = {
    "connections": "Connections from senders that are open.",
    "sessions_in": "Senders that are connected.",
    "sessions_out": "Receivers that this rank is connected to.",
    "sends_active": "SendPlanner under way.",
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
leases_aborted = Counter("tercet_leases_aborted", "Reservations that an abort ended.")
sends_aborted = Counter("tercet_sends_aborted", "SendPlanner that an abort, or their client's going away, ended.")


class AgentCollector(Collector):
    """Reads every agent's counters. ``agents`` are their control addresses and secrets, by rank."""

    def __init__(self, agents: Sequence[tuple[str, str]]) -> None:
        self._control = ControlClient(agents, ANSWER_SECONDS)

    def collect(self) -> Iterable[Metric]:
        """See ``prometheus_client``'s ``Collector``; nothing, and a line in the log, if an agent does not answer."""
        try:
            found: list[dict[str, int]] = self._control.call_all(ReadCounters())
        except EngineError as error:
            logger.warning("no transport metrics: %s", error.message)
            return
        for kind, names in ((GaugeMetricFamily, NOW), (CounterMetricFamily, TOTALS)):
            for name, meaning in names.items():
                family = kind(f"tercet_kv_{name}", meaning, labels=["rank"])
                for rank, counters in enumerate(found):
                    family.add_metric([str(rank)], counters.get(name, 0))
                yield family

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not ask the agents."""
        return ()


def export(agents: Sequence[tuple[str, str]]) -> None:
    """Add the agents' counters to ``/metrics``; relies on vLLM serving ``prometheus_client``'s own registry."""
    REGISTRY.register(AgentCollector(agents))
