"""The ``/metrics`` page of a router: its own metrics, under names that no engine uses.

vLLM's serving layer counts in this process the same quantities as engines, under the same names, and has gauges of a
scheduler that does not run here. Under these names a sum over routers and engines would count tokens twice, and a mean
would include zeros.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import prometheus_client
from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tercet.fleet import EngineFleet
from tercet.fleet.engine_gauges import EngineCollector
from tercet.router.observe.exemplars import WORKERS_VARIABLE, Bucket, KeptExemplar, by_bucket, with_exemplar
from tercet.router.observe.metrics import OTHER_ENGINES

METRICS = "/metrics"
OPENMETRICS = "application/openmetrics-text"
ExemplarsOfAll = Callable[[], Awaitable[Sequence[KeptExemplar]]]
OURS, VLLMS, SERVED = "tercet_", "vllm:", "tercet_served_"
COUNTED_HERE = frozenset({"prompt_tokens", "generation_tokens", "request_success"})
OBSERVED_HERE = frozenset(
    {"time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
     "request_time_per_output_token_seconds", "request_prompt_tokens", "request_generation_tokens",
     "request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens"}
)  # fmt: skip
KNOWN_HERE = COUNTED_HERE | OBSERVED_HERE
"""Those of vLLM's metrics that are true in a router: requests from their arrival to their end, and their tokens."""
OF_ENGINES = ("engine", "to")


class ServedMetrics(Collector):
    """The metrics of ``source`` under a router's names, with ``exemplars``, and only for engines that are members."""

    def __init__(
        self, source: Collector | CollectorRegistry, fleet: EngineFleet, exemplars: Mapping[Bucket, Exemplar]
    ) -> None:
        self._source = source
        self._fleet = fleet
        self._exemplars = exemplars

    def collect(self) -> Iterable[Metric]:
        here = {OTHER_ENGINES, *(member.name for member in self._fleet.members)}
        for metric in self._source.collect():
            if metric.name.startswith(VLLMS):
                yield from _served(metric)
            elif metric.name.startswith(OURS):
                yield self._of_members(metric, here)
            else:
                yield metric

    def describe(self) -> Iterable[Metric]:
        """Return no metrics: the registry need not collect at registration."""
        return ()

    def _of_members(self, metric: Metric, here: set[str]) -> Metric:
        """Return the metric without the series of engines that have left the fleet, which cannot change any more."""
        found = Metric(metric.name, metric.documentation, metric.type)
        found.samples = [
            with_exemplar(sample, self._exemplars) for sample in metric.samples
            if all(sample.labels[name] in here for name in OF_ENGINES if name in sample.labels)
        ]  # fmt: skip
        return found


def _served(metric: Metric) -> Iterator[Metric]:
    """Yield a metric of vLLM under Tercet's name and without its engine number, if it is true in a router."""
    if metric.name.removeprefix(VLLMS) not in KNOWN_HERE:
        return
    found = Metric(SERVED + metric.name.removeprefix(VLLMS), metric.documentation, metric.type)
    for sample in metric.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "engine"}
        found.samples.append(sample._replace(name=SERVED + sample.name.removeprefix(VLLMS), labels=labels))
    yield found


def metrics_of(fleet: EngineFleet, exemplars: Mapping[Bucket, Exemplar]) -> CollectorRegistry:
    """Return all metrics of a router: what its workers have counted together, and the gauges of engines."""
    registry = CollectorRegistry()
    if WORKERS_VARIABLE in os.environ:  # the shared files lack the values that are computed at each scrape
        counted = CollectorRegistry()
        MultiProcessCollector(counted)
        registry.register(ServedMetrics(counted, fleet, exemplars))
    else:
        registry.register(ServedMetrics(REGISTRY, fleet, exemplars))
    registry.register(EngineCollector(fleet))
    return registry


def with_metrics(app: ASGIApp, fleet: EngineFleet, exemplars: ExemplarsOfAll) -> ASGIApp:
    """Return ``app`` with the router's ``/metrics`` in place of vLLM's, including all paths below it."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")).startswith(METRICS):
            wanted = OPENMETRICS in Headers(scope=scope).get("accept", "")  # the older text format has no exemplars
            found = by_bucket(await exemplars()) if wanted else {}
            make = cast("Any", prometheus_client).make_asgi_app  # its type is incomplete
            await make(metrics_of(fleet, found))(scope, receive, send)
        else:
            await app(scope, receive, send)

    return answer
