"""The front door's own metrics, beside vLLM's, on ``/metrics``."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from prometheus_client import Counter, Gauge, Histogram

from tercet.fleet import Trace
from tercet.protocol import TercetError
from tercet.router.route_metrics import RouteMetrics

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counters of programs and verbs. Times are in seconds."""

    def __init__(self) -> None:
        self._running = Gauge(
            "tercet_sequences_running", "Sequences that this front door is serving.", multiprocess_mode="livesum"
        )
        self._sequences = Counter("tercet_sequences", "Sequences served to their end, by program.", ["program"])
        self._fallbacks = Counter(
            "tercet_fallbacks", "Sequences whose program failed and that one engine then served.", ["program", "code"]
        )
        self._retries = Counter(
            "tercet_retries", "Further attempts, by what failed and whether the client had a token.", ["code", "stage"]
        )
        self._errors = Counter("tercet_errors", "Sequences that ended in an error, by its code.", ["code"])
        self._ttft = Histogram("tercet_ttft_seconds", "Time to first token, by program.", ["program"], buckets=SECONDS)
        self._verb = Histogram(
            "tercet_verb_seconds", "Duration of a verb, as the front door sees it.", ["verb", "engine"], buckets=SECONDS
        )
        self._admitted = Gauge(
            "tercet_requests_in_flight", "HTTP requests that the gate has let in.", multiprocess_mode="livesum"
        )
        self._queued = Gauge(
            "tercet_requests_queued", "HTTP requests that wait at the gate.", multiprocess_mode="livesum"
        )
        self._waited = Histogram(
            "tercet_queue_seconds", "How long requests waited at the gate, of those that had to.", buckets=SECONDS
        )
        self._refused = Counter("tercet_requests_refused", "HTTP requests that never came in, by reason.", ["reason"])
        self._failures = Counter("tercet_program_failures", "Sequences that a program failed by itself.", ["program"])
        self._returns = Counter(
            "tercet_program_returns", "Returns to the version before, by the program that failed.", ["program"]
        )
        self._version = Gauge(
            "tercet_program_version", "The version of the programs in use.", multiprocess_mode="livemax"
        )
        self._workers = Gauge("tercet_workers", "Processes of this front door that serve.", multiprocess_mode="livesum")
        self._bytes = Counter("tercet_kv_sent_bytes", "KV sent between engines.", ["engine", "to"])
        self._routes = RouteMetrics()

    def serving(self) -> None:
        """This process accepts requests from now on."""
        self._workers.set(1)

    @contextmanager
    def sequence(self) -> Generator[None]:
        """One sequence under way."""
        self._running.inc()
        try:
            yield
        finally:
            self._running.dec()

    def finished(self, trace: Trace) -> None:
        """A sequence was served to its end."""
        self._sequences.labels(trace.program).inc()
        self._routes.finished(trace)
        if trace.ttft is not None:
            self._ttft.labels(trace.program).observe(trace.ttft)
        for event in trace.events:
            self._verb.labels(event.verb, event.engine).observe(event.seconds)
            if event.bytes:
                self._bytes.labels(event.engine, event.to).inc(event.bytes)

    def fell_back(self, program: str, code: str) -> None:
        """A program failed, and one engine goes on in its place."""
        self._fallbacks.labels(program, code).inc()

    def retried(self, code: str, answered: bool) -> None:
        """Another attempt begins after a failure; ``answered``: the client has a token already."""
        self._retries.labels(code, "after_first_token" if answered else "before_first_token").inc()

    def admission(self, in_flight: int, queued: int) -> None:
        """So many requests are in, and so many wait."""
        self._admitted.set(in_flight)
        self._queued.set(queued)

    def queued_for(self, seconds: float) -> None:
        """A request does not wait any more."""
        self._waited.observe(seconds)

    def refused(self, reason: str) -> None:
        """A request was sent away, or left before it came in."""
        self._refused.labels(reason).inc()

    def program_failed(self, program: str) -> None:
        """A program failed, and neither its client nor the fleet is to blame."""
        self._failures.labels(program).inc()

    def program_version(self, number: int) -> None:
        """New requests are served by this version."""
        self._version.set(number)

    def returned(self, program: str, to_version: int) -> None:
        """The front door went back to a version because a program kept failing."""
        self._returns.labels(program).inc()
        self._version.set(to_version)

    def failed(self, error: TercetError) -> None:
        """A sequence ended in an error."""
        self._errors.labels(error.code).inc()
