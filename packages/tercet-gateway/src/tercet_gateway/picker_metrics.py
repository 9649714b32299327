"""The metrics of an endpoint picker, with names of llm-d and the Gateway API Inference Extension where they exist."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tercet.fleet import EngineFleet
from tercet.wire import SECONDS
from tercet_gateway.openai_call import OpenAICall

DECISION_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1)
SIZES = (64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304)
TOKENS = (1, 16, 64, 256, 1024, 4096, 16384, 65536, 131072, 262144)
RATIOS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
MOST_MODELS, LONGEST_MODEL = 64, 256
"""Most model names with own labels in addition to those that engines report, and most characters of a name."""
OTHER_MODELS = "other"
"""The label of all other models: clients choose the names in requests."""


@dataclass(frozen=True)
class _OfModel:
    """The counters of one model's requests; decisions are ``split`` or ``whole``."""

    requests: Counter
    sizes: Histogram
    tokens: Histogram
    whole: Counter
    split: Counter


class PickerMetrics:
    """The counters of decisions; ``registry`` is shown at ``/metrics``. Times are in seconds.

    ``serves`` returns True for the name of a model that the fleet serves.
    """

    def __init__(self, serves: Callable[[str], bool], registry: CollectorRegistry | None = None) -> None:
        self._serves = serves
        self.registry = own = CollectorRegistry() if registry is None else registry
        model = ["model_name"]
        self._models: dict[str, _OfModel] = {}
        self._requests = Counter("inference_objective_request", "Requests that got endpoints.", model, registry=own)
        self._errors = Counter(
            "inference_objective_request_error", "Requests that were refused, by HTTP status.", ["error_code"],
            registry=own,
        )  # fmt: skip
        self._sizes = Histogram(
            "inference_objective_request_sizes", "Bytes of requests' bodies.", model, buckets=SIZES, registry=own
        )
        self._tokens = Histogram(
            "inference_objective_input_tokens", "Tokens of prompts, or an estimate.", model, buckets=TOKENS,
            registry=own,
        )  # fmt: skip
        self._decision = Histogram(
            "inference_extension_scheduler_e2e_duration_seconds", "Seconds from a whole request to its endpoints.",
            buckets=DECISION_SECONDS, registry=own,
        )  # fmt: skip
        self._hits = Histogram(
            "inference_extension_prefix_indexer_hit_ratio", "Estimated share of the prompt on the decode engine.",
            buckets=RATIOS, registry=own,
        )  # fmt: skip
        self._disaggregated = Counter(
            "llm_d_inference_scheduler_disagg_decision", "Decisions by kind.", ["model_name", "decision_type"],
            registry=own,
        )  # fmt: skip
        self.refused = Counter("tercet_requests_refused", "Requests that were not admitted.", ["reason"], registry=own)
        self.waited = Histogram(
            "inference_extension_flow_control_request_queue_duration_seconds", "Seconds that waiting requests waited.",
            buckets=SECONDS, registry=own,
        )  # fmt: skip
        self._queued = Gauge(
            "inference_extension_flow_control_queue_size", "Requests that wait for room.", registry=own
        )
        self._served = Counter(
            "tercet_picker_served", "Answers that began, by the endpoint that served them.", ["endpoint"],
            registry=own,
        )  # fmt: skip
        self.streams = Gauge("tercet_picker_streams", "Requests that Envoy shows now.", registry=own)

    def decided(self, call: OpenAICall, tokens: int, cached: int, split: bool, seconds: float) -> None:
        """Count a request that has its endpoints."""
        counted = self._counted_as(call.body.model or "")
        counted.requests.inc()
        self._decision.observe(seconds)
        if call.size:
            counted.sizes.observe(call.size)
        if tokens:
            counted.tokens.observe(tokens)
            self._hits.observe(min(1.0, cached / tokens))
            (counted.split if split else counted.whole).inc()

    def failed(self, status: int) -> None:
        """Count a refused request, by HTTP status."""
        self._errors.labels(str(status)).inc()

    def served(self, place: int | None) -> None:
        """Count an answer that began: from the endpoint at index ``place`` of the list, or from another one."""
        self._served.labels("other" if place is None else "first" if place == 0 else "fallback").inc()

    def admission(self, in_flight: int, queued: int) -> None:
        """Set the number of waiting requests."""
        self._queued.set(queued)

    def _counted_as(self, model: str) -> _OfModel:
        """Return a model's counters, from a cache: looking them up costs more than counting."""
        if (found := self._models.get(model)) is not None:
            return found
        # An engine reports one of its names, and clients may use its others: these share places with invented names.
        has_own = len(model) <= LONGEST_MODEL and (self._serves(model) or len(self._models) < MOST_MODELS)
        name = model if has_own else OTHER_MODELS
        if name not in self._models:
            kinds = self._disaggregated
            self._models[name] = _OfModel(
                self._requests.labels(name),
                self._sizes.labels(name),
                self._tokens.labels(name),
                kinds.labels(name, "decode-only"),
                kinds.labels(name, "prefill-decode"),
            )
        return self._models[name]


class PoolCollector(Collector):
    """A collector of engines' reports, averaged over the pool ``name``; it collects when metrics are read."""

    def __init__(self, fleet: EngineFleet, name: str) -> None:
        self._fleet = fleet
        self._name = name

    def collect(self) -> Iterable[Metric]:
        ready = [member for member in self._fleet.members if member.reachable and not member.leaving]
        last = {member.name: self._fleet.knowledge.loads.last(member.name) for member in ready}
        loads = {name: found[0] for name, found in last.items() if found is not None}
        many = max(1, len(loads))
        averages = {
            "inference_pool_ready_pods": ("Engines that may be picked.", float(len(ready))),
            "inference_pool_average_queue_size": (
                "Requests that wait, per engine.", sum(load.waiting for load in loads.values()) / many,
            ),
            "inference_pool_average_running_requests": (
                "Requests that run, per engine.", sum(load.running for load in loads.values()) / many,
            ),
            "inference_pool_average_kv_cache_utilization": (
                "Share of the KV cache in use, per engine.", sum(load.kv_usage for load in loads.values()) / many,
            ),
        }  # fmt: skip
        for metric, (meaning, value) in averages.items():
            gauge = GaugeMetricFamily(metric, meaning, labels=["name"])
            gauge.add_metric([self._name], value)
            yield gauge
        queues = GaugeMetricFamily(
            "inference_pool_per_pod_queue_size", "Requests that wait.", labels=["name", "model_server_pod"]
        )
        for name, load in loads.items():
            queues.add_metric([self._name, name], load.waiting)
        yield queues

    def describe(self) -> Iterable[Metric]:
        """Describe no metrics: the registry need not collect at registration."""
        return ()
