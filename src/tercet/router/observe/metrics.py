"""The metrics that a router counts itself, their exemplars, and the ``/metrics`` page that shows them.

The page has names that no engine uses. vLLM's serving layer counts in this process the same quantities as engines,
under the same names, and has gauges of a scheduler that does not run here: under these names a sum over routers and
engines would count tokens twice, and a mean would include zeros.

An exemplar is the last request of a sampled trace in a bucket of a histogram, for scrapers that use OpenMetrics. The
Python client of Prometheus does not support exemplars of several processes. Therefore each worker of a router keeps its
own, and the worker that is scraped asks the others for theirs.
"""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import prometheus_client
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric, Summary
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType]
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tercet.decisions.cost import RouteDecision
from tercet.fleet import EngineFleet, Trace
from tercet.fleet.engine_fleet import EngineCollector
from tercet.fleet.prefix_index import NEAR
from tercet.protocol.spans import FALLBACK, RETRY, SpanContext, current_span
from tercet.wire import SECONDS

if TYPE_CHECKING:  # they count here
    from tercet.decisions.sessions import Pause
    from tercet.router.serve.moves import MoveRecord
    from tercet.router.serve.sessions import MoveEnd, PinEnd, Ran

# Environment variable with the folder in which the workers of one router count together.
WORKERS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
# Largest number of exemplars of a process; beyond it the oldest is dropped.
MOST_EXEMPLARS = 4096
_BOUNDS = tuple(floatToGoString(bound) for bound in (*SECONDS, math.inf))
Bucket = tuple[str, frozenset[tuple[str, str]]]


class KeptExemplar(NamedTuple):
    """One measurement: its histogram and the labels of its bucket, its value (s), Unix time (s), trace and span."""

    histogram: str
    labels: dict[str, str]
    value: float
    at: float
    trace_id: str
    span_id: str

    @property
    def bucket(self) -> Bucket:
        """The bucket of the measurement: the name of its series, and its labels."""
        return f"{self.histogram}_bucket", frozenset(self.labels.items())


class Exemplars:
    """The exemplars of this process, for histograms with the buckets :data:`~tercet.wire.SECONDS`."""

    def __init__(self) -> None:
        self._kept: dict[Bucket, KeptExemplar] = {}

    def note(
        self, histogram: str, labels: Mapping[str, str], value: float, at: float, context: SpanContext, span: str = ""
    ) -> None:  # fmt: skip
        """Keep a measurement of a ``span``, or of ``context``, if its trace is sampled; ``at`` is a Unix time (s)."""
        if not context.sampled:
            return
        in_bucket = {**labels, "le": _BOUNDS[bisect_left(SECONDS, value)]}
        found = KeptExemplar(histogram, in_bucket, value, at, context.trace_id, span or context.span_id)
        # One for each bucket and label, as OpenMetrics has it; the oldest goes when there are too many labels.
        self._kept.pop(found.bucket, None)  # so that the newest is the last
        self._kept[found.bucket] = found
        if len(self._kept) > MOST_EXEMPLARS:
            del self._kept[next(iter(self._kept))]

    def kept(self) -> list[KeptExemplar]:
        return list(self._kept.values())


def by_bucket(kept: Iterable[KeptExemplar]) -> dict[Bucket, Exemplar]:
    """Return the newest exemplar of each bucket, of all processes."""
    return {
        each.bucket: Exemplar({"trace_id": each.trace_id, "span_id": each.span_id}, each.value, each.at)
        for each in sorted(kept, key=lambda each: each.at)
    }


RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
# The reason of a move is free text of the caller, so the number of different reasons is limited.
MOST_REASONS = 32
OTHER_REASONS = "other"
# Largest number of pairs of engines that are counted by name: 64 that prefill times 64 that decode.
MOST_PAIRS = 4096
OTHER_ENGINES = "other"
TTFT, TPOT, VERB = "tercet_ttft_seconds", "tercet_tpot_seconds", "tercet_verb_seconds"


class Metrics:
    """The metrics of a router process, in ``registry``. Times are in seconds.

    Updates of more than one metric, and those that simulations leave out, have a method.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.exemplars = Exemplars()
        self._pairs: set[tuple[str, str]] = set()
        self._reasons: set[str] = set()
        self._declare_serving(registry)
        self._declare_fleet(registry)

    def _declare_serving(self, registry: CollectorRegistry) -> None:
        """Declare the metrics of sequences and their clients' latencies, of programs, routes, and the gate."""
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram, summed = partial(Histogram, registry=registry), partial(gauge, multiprocess_mode="livesum")
        self._running = summed("tercet_sequences_running", "Sequences that this router is serving.")
        self._sequences = counter("tercet_sequences", "Sequences served to their end, by program.", ["program"])
        self.fallbacks = counter(
            "tercet_fallbacks", "Sequences whose program failed and that one engine then served.", ["program", "code"]
        )
        self.retries = counter(
            "tercet_retries", "Retries, by the failure's code and whether the client had a token.", ["code", "stage"]
        )
        self.errors = counter("tercet_errors", "Sequences that ended in an error, by its code.", ["code"])
        self._ttft = histogram(TTFT, "Time to first token, by program.", ["program"], buckets=SECONDS)
        self._ttft_by_engine = Summary(
            "tercet_ttft_by_engine_seconds", "Time to first token, by the engine that took most of it.", ["engine"],
            registry=registry,
        )  # fmt: skip
        self._tpot = histogram(TPOT, "Time per output token after the first, by program.", ["program"], buckets=SECONDS)
        self._objectives = counter(
            "tercet_objective_requests",
            "Requests that ended, by class and whether they met its objectives; the rate of `met` is the goodput.",
            ["class", "result"],
        )
        self.program_failures = counter(
            "tercet_program_failures", "Sequences that failed by a fault of their program.", ["program"]
        )
        self.program_returns = counter(
            "tercet_program_returns", "Returns to the previous version, by the program that failed.", ["program"]
        )
        self.program_version = gauge(
            "tercet_program_version", "The version of the programs in use.", multiprocess_mode="livemax"
        )
        self._routes = counter("tercet_routes", "Routes chosen by cost, by kind and reason.", ["kind", "why"])
        self._pulls = counter(
            "tercet_pulls",
            "Pulls of cached KV, by what came: the `whole` that was expected, a `part` of it, `nothing`, "
            "or they `failed`.",
            ["outcome"],
        )
        self._pulled_tokens = counter("tercet_pulled_tokens", "Prompt tokens whose KV was pulled from another engine.")
        self._ratio = histogram(
            "tercet_route_prediction_ratio", "Measured over predicted TTFT or TPOT.", ["what"], buckets=RATIOS
        )
        self._admitted = summed(
            "tercet_requests_in_flight",
            "Slots in use: one for each request, and one for each further sequence of it that runs.",
        )
        self._queued = summed("tercet_requests_queued", "HTTP requests that wait at the gate.")
        self.waited = histogram(
            "tercet_queue_seconds", "Time in the queue of the gate, for requests that had to wait.", buckets=SECONDS
        )
        self.refused = counter("tercet_requests_refused", "HTTP requests that were refused, by reason.", ["reason"])
        self.batch_requests = counter(
            "tercet_batch_requests", "Requests of batches: `completed`, `failed`, or `put_back` for later.", ["result"]
        )
        self.batch_running = summed("tercet_batch_requests_running", "Requests of batches that run.")

    def _declare_fleet(self, registry: CollectorRegistry) -> None:
        """Declare the metrics of the fleet, its engines, their verbs and prefix caches, and of moves."""
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram, summed = partial(Histogram, registry=registry), partial(gauge, multiprocess_mode="livesum")
        self._state = gauge(
            "tercet_fleet_state_version", "The version of the fleet's state in use.", multiprocess_mode="livemin"
        )
        self._state_failed = summed("tercet_fleet_state_failed", "Processes that cannot apply the newest state.")
        self.workers = summed("tercet_workers", "Processes of this router that serve.")
        self._pooling = gauge(
            "tercet_pooling_server_up", "1 if the server of a pooling model answers, 0 if not.", ["server"],
            multiprocess_mode="livemin",
        )  # fmt: skip
        self.flips = counter("tercet_role_flips", "Engines whose role the router changed by itself.", ["role"])
        self._pressure = gauge(
            "tercet_role_pressure", "Pressure of a role, if roles follow the load; 1 is the objective's limit.",
            ["role"], multiprocess_mode="livemostrecent",
        )  # fmt: skip
        self._verb = histogram(VERB, "Duration of a verb, seen by the router.", ["verb", "engine"], buckets=SECONDS)
        self._bytes = counter(
            "tercet_kv_sent_bytes", f"KV sent between engines; after {MOST_PAIRS} pairs `to` is `{OTHER_ENGINES}`.",
            ["engine", "to"],
        )  # fmt: skip
        compared = ["program", "engine"]
        self._predicted = counter(
            "tercet_prefix_predicted_tokens", "Prompt tokens that picks expected in the engine's cache.", compared
        )
        self._delivered = counter(
            "tercet_prefix_delivered_tokens",
            "Prompt tokens that the engine found in its cache, for picks with a prediction.",
            compared,
        )
        self._missing = counter(
            "tercet_prefix_missing_tokens", "Predicted tokens that the engine did not find, summed by pick.", compared
        )
        self._tiers = counter(
            "tercet_prefix_tier_tokens",
            "Prompt tokens by the tier where picks expected them, of engines with lower tiers: `predicted`, and "
            "`delivered`, if an engine finds its highest tier first.",
            ["tier", "what"],
        )
        self.moves_running = summed("tercet_moves_running", "Sequences that are being moved to another engine.")
        self._moves_held_back = summed(
            "tercet_moves_held_back", "Moves that policies propose, but that limits do not allow yet."
        )
        self._moves = counter("tercet_moves", "Moves of running sequences.", ["reason", "outcome", "code"])
        self._moved_bytes = counter("tercet_moved_bytes", "KV sent by moves.")
        self._moves_recomputed = counter(
            "tercet_moves_recomputed_tokens", "Positions of moved sequences that were computed again."
        )
        self._pause = histogram(
            "tercet_move_pause_seconds", "Time from the source's last token to the next token.", buckets=SECONDS
        )

    def objectives(self, of_class: str, met: bool) -> None:
        self._objectives.labels(of_class, "met" if met else "missed").inc()

    def pressures(self, prefill: float, decode: float) -> None:
        self._pressure.labels("prefill").set(prefill)
        self._pressure.labels("decode").set(decode)

    def fleet_state(self, version: int, failed: bool) -> None:
        self._state.set(version)
        self._state_failed.set(failed)

    def sequence(self) -> AbstractContextManager[object]:
        return self._running.track_inprogress()

    def finished(self, trace: Trace) -> None:
        self._sequences.labels(trace.program).inc()
        if trace.decision is not None:
            self._routed(trace, trace.decision)
        context = current_span()
        if trace.ttft is not None:
            self._observe(self._ttft, TTFT, {"program": trace.program}, trace.ttft, context)
            if slowest := trace.slowest_engine:
                self._ttft_by_engine.labels(slowest).observe(trace.ttft)
        if trace.tpot is not None:
            self._observe(self._tpot, TPOT, {"program": trace.program}, trace.tpot, context)
        for event in trace.events:
            if event.verb in (FALLBACK, RETRY):
                continue
            verb = {"verb": event.verb, "engine": event.engine}
            self._observe(self._verb, VERB, verb, event.seconds, context, event.span)
            if event.predicted is not None:
                pair = trace.program, event.engine
                self._predicted.labels(*pair).inc(event.predicted)
                self._delivered.labels(*pair).inc(event.cached)
                self._missing.labels(*pair).inc(max(0, event.predicted - event.cached))
                # What the engine had cached is ascribed to its tiers in the order of the pick's.
                left = event.cached
                tiers = (pick.tiers.items() for pick in trace.picks if pick.engine == event.engine and pick.tiers)
                for tier, predicted in next(tiers, ()):
                    delivered = min(predicted, left)
                    left -= delivered
                    self._tiers.labels(tier, "predicted").inc(predicted)
                    self._tiers.labels(tier, "delivered").inc(delivered)
            if event.cached_only:
                # All that was expected, but for a block that was not whole; a part of it; or nothing.
                whole = event.predicted is None or event.predicted - event.end < NEAR
                self._pulls.labels("nothing" if event.end <= event.begin else "whole" if whole else "part").inc()
                self._pulled_tokens.inc(event.end - event.begin)
            if event.bytes:
                # Pairs of engines grow with the square of the fleet, and each is a series.
                pair = event.engine, event.to
                if len(self._pairs) < MOST_PAIRS:
                    self._pairs.add(pair)
                to = event.to if pair in self._pairs else OTHER_ENGINES
                self._bytes.labels(event.engine, to).inc(event.bytes)

        for _ in range(sum(event.cached_only for event in trace.failed)):
            self._pulls.labels("failed").inc()

    def _observe(
        self, histogram: Histogram, name: str, labels: dict[str, str], value: float, context: SpanContext | None,
        span: str = "",
    ) -> None:  # fmt: skip
        """Observe ``value``; ``labels`` are in the order of the histogram's declaration."""
        histogram.labels(*labels.values()).observe(value)
        if context is not None:
            self.exemplars.note(name, labels, value, time.time(), context, span)

    def moved(self, move: MoveRecord) -> None:
        if len(self._reasons) < MOST_REASONS:
            self._reasons.add(move.reason)
        reason = move.reason if move.reason in self._reasons else OTHER_REASONS
        self._moves.labels(reason, move.outcome, move.code).inc()
        self._moved_bytes.inc(move.bytes)
        self._moves_recomputed.inc(move.recomputed)
        if move.pause is not None:
            self._pause.observe(move.pause)

    def held_back(self, moves: int) -> None:
        self._moves_held_back.set(moves)

    def admission(self, in_flight: int, queued: int) -> None:
        self._admitted.set(in_flight)
        self._queued.set(queued)

    def pooling_server(self, url: str, answers: bool) -> None:
        self._pooling.labels(url).set(answers)

    def _routed(self, trace: Trace, decision: RouteDecision) -> None:
        """Count the choice of a route, and the ratio of measured to predicted latency."""
        self._routes.labels(decision.kind, "to_learn" if decision.explored else "cheapest").inc()
        chosen = decision.chosen
        if trace.events and trace.events[-1].engine != chosen.decode:
            return  # another engine served the sequence, so its latency cannot be compared with the prediction
        for what, measured, predicted in (("ttft", trace.ttft, chosen.ttft), ("tpot", trace.tpot, chosen.tpot)):
            if measured is not None and predicted > 0:
                self._ratio.labels(what).observe(measured / predicted)


CopyOutcome = Literal["copied", "held", "gone", "dropped", "failed"]


class WriteBehindMetrics:
    """The metrics of copies of prompts to stores by one router process."""

    def __init__(self) -> None:
        self._copies = Counter(
            "tercet_write_behind",
            "Copies of prompts to stores: `copied`, `held` there before, `gone` from the engine, `dropped` under load, "
            "`failed`.",
            ["outcome"],
        )
        self._tokens = Counter("tercet_write_behind_tokens", "Tokens whose KV was copied to stores.")

    def ended(self, outcome: CopyOutcome, tokens: int = 0) -> None:
        self._copies.labels(outcome).inc()
        self._tokens.inc(tokens)


CopyReason = Literal["start", "drain"]


class HotContextMetrics:
    """The metrics of the most wanted contexts that one router process has copied."""

    def __init__(self) -> None:
        self._copies = Counter(
            "tercet_hot_contexts",
            "Copies of the most wanted contexts, at an engine's `start` to it, at its `drain` from it: `copied`, "
            "`held` there before, `gone` from the source, `failed`.",
            ["at", "outcome"],
        )
        self._tokens = Counter("tercet_hot_context_tokens", "Tokens of these copies.", ["at"])

    def ended(self, at: CopyReason, outcome: CopyOutcome, tokens: int = 0) -> None:
        self._copies.labels(at, outcome).inc()
        self._tokens.labels(at).inc(tokens)


class SessionMetrics:
    """The metrics of the sessions of one router process."""

    def __init__(self) -> None:
        self._sessions = Gauge("tercet_sessions", "Sessions that the router remembers.", multiprocess_mode="livesum")
        self._kept = Gauge(
            "tercet_sessions_kept", "Contexts of sessions whose KV is pinned on engines.", multiprocess_mode="livesum"
        )
        self._turns = Counter(
            "tercet_session_turns",
            "Turns of sessions, by engine: the `first` turn of a session, on the engine that the session is `bound` "
            "to, or on an `other` one.",
            ["engine"],
        )
        self._pauses = Histogram(
            "tercet_session_pause_seconds", "Time from an answer to the next turn, by what the session waited for.",
            ["waited_for"], buckets=SECONDS,
        )  # fmt: skip
        self._moves = Counter(
            "tercet_session_moves", "Contexts that left a drained engine: `moved`, `absent` from its cache, `failed`.",
            ["outcome"],
        )  # fmt: skip
        self._bytes = Counter("tercet_session_moved_bytes", "KV sent by moves of contexts.")
        self._pins = Counter(
            "tercet_session_pins",
            "Pins of contexts that ended: `given_up` by the router, `refused` by the engine, `lost` with it.",
            ["end"],
        )

    def sizes(self, sessions: int, kept: int) -> None:
        self._sessions.set(sessions)
        self._kept.set(kept)

    def turn(self, ran: Ran) -> None:
        self._turns.labels(ran).inc()

    def paused(self, waited_for: Pause, seconds: float) -> None:
        self._pauses.labels(waited_for).observe(seconds)

    def moved(self, end: MoveEnd, sent: int) -> None:
        self._moves.labels(end).inc()
        self._bytes.inc(sent)

    def unpinned(self, end: PinEnd) -> None:
        self._pins.labels(end).inc()


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
# Those of vLLM's metrics that are true in a router: requests from their arrival to their end, and their tokens.
KNOWN_HERE = COUNTED_HERE | OBSERVED_HERE
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
        # A counter keeps the series of every engine that it has counted for.
        here = {OTHER_ENGINES, *(member.name for member in self._fleet.members)}
        for metric in self._source.collect():
            if metric.name.startswith(VLLMS):
                name = metric.name.removeprefix(VLLMS)
                if name not in KNOWN_HERE:
                    continue
                found = Metric(SERVED + name, metric.documentation, metric.type)
                for sample in metric.samples:  # an engine's number means nothing in a router
                    labels = {label: value for label, value in sample.labels.items() if label != "engine"}
                    own = SERVED + sample.name.removeprefix(VLLMS)
                    found.samples.append(sample._replace(name=own, labels=labels))
                yield found
            elif metric.name.startswith(OURS):
                # Series of engines that have left the fleet cannot change any more.
                found = Metric(metric.name, metric.documentation, metric.type)
                for sample in metric.samples:
                    if all(sample.labels[name] in here for name in OF_ENGINES if name in sample.labels):
                        bucket = sample.name, frozenset(sample.labels.items())
                        exemplar = self._exemplars.get(bucket) if self._exemplars else None
                        found.samples.append(sample if exemplar is None else sample._replace(exemplar=exemplar))
                yield found
            else:
                yield metric

    def describe(self) -> Iterable[Metric]:
        """Return no metrics: the registry need not collect at registration."""
        return ()


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
