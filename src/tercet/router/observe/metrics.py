"""The metrics that a router counts itself; :mod:`.exposition` assembles ``/metrics``."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

from prometheus_client import Counter, Gauge, Histogram, Summary

from tercet.fleet import Trace
from tercet.protocol.spans import SpanContext, current_span
from tercet.protocol.trace import FALLBACK, RETRY, TraceEvent
from tercet.router.observe.exemplars import Exemplars
from tercet.router.serve.moves import MoveRecord
from tercet.wire import SECONDS

RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
# The reason of a move is free text of the caller, so the number of different reasons is limited.
MOST_REASONS = 32
OTHER_REASONS = "other"
# Largest number of pairs of engines that are counted by name: 64 that prefill times 64 that decode.
MOST_PAIRS = 4096
OTHER_ENGINES = "other"
TTFT, TPOT, VERB = "tercet_ttft_seconds", "tercet_tpot_seconds", "tercet_verb_seconds"


class Metrics:
    """The metrics of a router process; updates of more than one metric have a method. Times are in seconds."""

    def __init__(self) -> None:
        self.exemplars = Exemplars()
        self._declare_sequences()
        self._declare_programs()
        self._declare_gate()
        self._declare_fleet()
        self._declare_moves()

    def _declare_sequences(self) -> None:
        """Declare the metrics of sequences and of their clients' latencies."""
        self._running = Gauge(
            "tercet_sequences_running", "Sequences that this router is serving.", multiprocess_mode="livesum"
        )
        self._sequences = Counter("tercet_sequences", "Sequences served to their end, by program.", ["program"])
        self._fallbacks = Counter(
            "tercet_fallbacks", "Sequences whose program failed and that one engine then served.", ["program", "code"]
        )
        self._retries = Counter(
            "tercet_retries", "Retries, by the failure's code and whether the client had a token.", ["code", "stage"]
        )
        self.errors = Counter("tercet_errors", "Sequences that ended in an error, by its code.", ["code"])
        self._ttft = Histogram(TTFT, "Time to first token, by program.", ["program"], buckets=SECONDS)
        self._ttft_by_engine = Summary(
            "tercet_ttft_by_engine_seconds",
            "Time to first token, by the engine that took most of it.",
            ["engine"],
        )
        self._tpot = Histogram(TPOT, "Time per output token after the first, by program.", ["program"], buckets=SECONDS)
        self._objectives = Counter(
            "tercet_objective_requests",
            "Requests that ended, by class and whether they met its objectives; the rate of `met` is the goodput.",
            ["class", "result"],
        )

    def _declare_programs(self) -> None:
        """Declare the metrics of programs and routes."""
        self._failures = Counter(
            "tercet_program_failures", "Sequences that failed by a fault of their program.", ["program"]
        )
        self._returns = Counter(
            "tercet_program_returns", "Returns to the previous version, by the program that failed.", ["program"]
        )
        self._version = Gauge(
            "tercet_program_version", "The version of the programs in use.", multiprocess_mode="livemax"
        )
        self._routes = Counter("tercet_routes", "Routes chosen by cost, by kind and reason.", ["kind", "why"])
        self._ratio = Histogram(
            "tercet_route_prediction_ratio", "Measured over predicted TTFT or TPOT.", ["what"], buckets=RATIOS
        )

    def _declare_gate(self) -> None:
        """Declare the metrics of HTTP requests at the gate."""
        self._admitted = Gauge(
            "tercet_requests_in_flight",
            "Slots in use: one for each request, and one for each further sequence of it that runs.",
            multiprocess_mode="livesum",
        )
        self._queued = Gauge(
            "tercet_requests_queued", "HTTP requests that wait at the gate.", multiprocess_mode="livesum"
        )
        self.waited = Histogram(
            "tercet_queue_seconds", "Time in the queue of the gate, for requests that had to wait.", buckets=SECONDS
        )
        self.refused = Counter("tercet_requests_refused", "HTTP requests that were refused, by reason.", ["reason"])

    def _declare_fleet(self) -> None:
        """Declare the metrics of the fleet, its engines, their verbs and their prefix caches."""
        self._state = Gauge(
            "tercet_fleet_state_version", "The version of the fleet's state in use.", multiprocess_mode="livemin"
        )
        self._state_failed = Gauge(
            "tercet_fleet_state_failed", "Processes that cannot apply the newest state.", multiprocess_mode="livesum"
        )
        self.workers = Gauge("tercet_workers", "Processes of this router that serve.", multiprocess_mode="livesum")
        self._pooling = Gauge(
            "tercet_pooling_server_up", "1 if the server of a pooling model answers, 0 if not.", ["server"],
            multiprocess_mode="livemin",
        )  # fmt: skip
        self._flips = Counter("tercet_role_flips", "Engines whose role the router changed by itself.", ["role"])
        self._pressure = Gauge(
            "tercet_role_pressure", "Pressure of a role, if roles follow the load; 1 is the objective's limit.",
            ["role"], multiprocess_mode="livemostrecent",
        )  # fmt: skip
        self._verb = Histogram(VERB, "Duration of a verb, seen by the router.", ["verb", "engine"], buckets=SECONDS)
        self._bytes = Counter(
            "tercet_kv_sent_bytes", f"KV sent between engines; after {MOST_PAIRS} pairs `to` is `{OTHER_ENGINES}`.",
            ["engine", "to"],
        )  # fmt: skip
        self._pairs: set[tuple[str, str]] = set()
        compared = ["program", "engine"]
        self._predicted = Counter(
            "tercet_prefix_predicted_tokens",
            "Prompt tokens that picks expected in the engine's cache.",
            compared,
        )
        self._delivered = Counter(
            "tercet_prefix_delivered_tokens",
            "Prompt tokens that the engine found in its cache, for picks with a prediction.",
            compared,
        )  # fmt: skip
        self._missing = Counter(
            "tercet_prefix_missing_tokens", "Predicted tokens that the engine did not find, summed by pick.", compared
        )

    def _declare_moves(self) -> None:
        """Declare the metrics of moves of running sequences."""
        self._moves_running = Gauge(
            "tercet_moves_running", "Sequences that are being moved to another engine.", multiprocess_mode="livesum"
        )
        self._moves_held_back = Gauge(
            "tercet_moves_held_back", "Moves that policies propose, but that limits do not allow yet.",
            multiprocess_mode="livesum",
        )  # fmt: skip
        self._moves = Counter("tercet_moves", "Moves of running sequences.", ["reason", "outcome", "code"])
        self._reasons: set[str] = set()
        self._moved_bytes = Counter("tercet_moved_bytes", "KV sent by moves.")
        self._moves_recomputed = Counter(
            "tercet_moves_recomputed_tokens", "Positions of moved sequences that were computed again."
        )
        self._pause = Histogram(
            "tercet_move_pause_seconds", "Time from the source's last token to the next token.", buckets=SECONDS
        )

    def objectives(self, of_class: str, met: bool) -> None:
        """Count a request that ended, and whether it met its class's objectives."""
        self._objectives.labels(of_class, "met" if met else "missed").inc()

    def flipped(self, role: str, engines: int) -> None:
        """Count engines whose role the router changed to ``role``."""
        self._flips.labels(role).inc(engines)

    def pressures(self, prefill: float, decode: float) -> None:
        """Set the present pressure of each role."""
        self._pressure.labels("prefill").set(prefill)
        self._pressure.labels("decode").set(decode)

    def fleet_state(self, version: int, failed: bool) -> None:
        """Set the version of the fleet's state in use, and whether a later version cannot be applied."""
        self._state.set(version)
        self._state_failed.set(failed)

    def sequence(self) -> AbstractContextManager[object]:
        """Return a context in which a sequence counts as running."""
        return self._running.track_inprogress()

    def finished(self, trace: Trace) -> None:
        """Count a sequence that was served to its end."""
        self._sequences.labels(trace.program).inc()
        self._routed(trace)
        place = current_span()
        if trace.ttft is not None:
            self._observe(self._ttft, TTFT, {"program": trace.program}, trace.ttft, place)
            if slowest := trace.slowest_engine:
                self._ttft_by_engine.labels(slowest).observe(trace.ttft)
        if trace.tpot is not None:
            self._observe(self._tpot, TPOT, {"program": trace.program}, trace.tpot, place)
        for event in trace.events:
            if event.verb in (FALLBACK, RETRY):
                continue
            verb = {"verb": event.verb, "engine": event.engine}
            self._observe(self._verb, VERB, verb, event.seconds, place, event.span)
            if event.predicted is not None:
                self._compared(trace.program, event, event.predicted)
            if event.bytes:
                self._bytes.labels(event.engine, self._counted_as(event.engine, event.to)).inc(event.bytes)

    def _observe(
        self, histogram: Histogram, name: str, labels: dict[str, str], value: float, place: SpanContext | None,
        span: str = "",
    ) -> None:  # fmt: skip
        """Observe ``value``; ``labels`` are in the order of the histogram's declaration."""
        histogram.labels(*labels.values()).observe(value)
        if place is not None:
            self.exemplars.note(name, labels, value, time.time(), place, span)

    def retried(self, code: str, answered: bool) -> None:
        """Count another attempt after a failure; ``answered`` is true if the client has a token already."""
        self._retries.labels(code, "after_first_token" if answered else "before_first_token").inc()

    def fell_back(self, program: str, code: str) -> None:
        """Count a sequence whose program failed and that one engine continues."""
        self._fallbacks.labels(program, code).inc()

    def program_failed(self, program: str) -> None:
        """Count a failure that the program itself caused."""
        self._failures.labels(program).inc()

    def uses(self, version: int) -> None:
        """Set the version of the programs that serve requests."""
        self._version.set(version)

    def move(self) -> AbstractContextManager[object]:
        """Return a context in which a move counts as running."""
        return self._moves_running.track_inprogress()

    def moved(self, move: MoveRecord) -> None:
        """Count a move that has ended."""
        if len(self._reasons) < MOST_REASONS:
            self._reasons.add(move.reason)
        reason = move.reason if move.reason in self._reasons else OTHER_REASONS
        self._moves.labels(reason, move.outcome, move.code).inc()
        self._moved_bytes.inc(move.bytes)
        self._moves_recomputed.inc(move.recomputed)
        if move.pause is not None:
            self._pause.observe(move.pause)

    def held_back(self, moves: int) -> None:
        """Set the number of proposed moves that limits do not allow yet."""
        self._moves_held_back.set(moves)

    def admission(self, in_flight: int, queued: int) -> None:
        """Set the numbers of admitted and of waiting requests."""
        self._admitted.set(in_flight)
        self._queued.set(queued)

    def pooling_server(self, url: str, answers: bool) -> None:
        """Set whether a server of a pooling model answers."""
        self._pooling.labels(url).set(answers)

    def returned(self, program: str, to_version: int) -> None:
        """Count a return of the router to an earlier version after ``program`` kept failing."""
        self._returns.labels(program).inc()
        self.uses(to_version)

    def _counted_as(self, engine: str, to: str) -> str:
        """Return the label of a receiver: its name, or a common one beyond :data:`MOST_PAIRS` pairs."""
        pair = engine, to
        if len(self._pairs) < MOST_PAIRS:
            self._pairs.add(pair)
        return to if pair in self._pairs else OTHER_ENGINES

    def _compared(self, program: str, event: TraceEvent, predicted: int) -> None:
        """Count the cached tokens that a pick predicted, and those that the engine found."""
        self._predicted.labels(program, event.engine).inc(predicted)
        self._delivered.labels(program, event.engine).inc(event.cached)
        self._missing.labels(program, event.engine).inc(max(0, predicted - event.cached))

    def _routed(self, trace: Trace) -> None:
        """Count the choice of a route and the ratio of measured to predicted latency, for a trace with a decision."""
        decision = trace.decision
        if decision is None:
            return
        self._routes.labels(decision.kind, "to_learn" if decision.explored else "cheapest").inc()
        chosen = decision.chosen
        if trace.events and trace.events[-1].engine != chosen.decode:
            return  # another engine served the sequence, so its latency cannot be compared with the prediction
        for what, measured, predicted in (("ttft", trace.ttft, chosen.ttft), ("tpot", trace.tpot, chosen.tpot)):
            if measured is not None and predicted > 0:
                self._ratio.labels(what).observe(measured / predicted)
