"""Computes numbers from records: latencies, throughput and goodput. No I/O.

Names are those of ``vllm bench serve``: TTFT, TPOT, ITL and E2EL (end-to-end latency; elsewhere job completion time,
JCT), all from the moment a request was sent; percentiles interpolate linearly, as its percentiles do. In addition there
are the same latencies from the moment at which a request was *scheduled*. They contain the client's own delay and the
wait for a free slot, so a target that stalls cannot hide the requests that it kept from being sent.

Failed requests have no latency: they count in ``failed``, in ``errors``, and against goodput.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from tercet.decisions.objectives import within
from tercet.lab.bench.results import RequestRecord

Floats = NDArray[np.float64]
Limit = Annotated[float, msgspec.Meta(gt=0)]
MS = 1000.0
INTERRUPTED = "interrupted"
# Requests of which one is expected beyond the percentile; with fewer it is only the maximum.
REQUESTS_NEEDED = {"p90": 10, "p99": 100}
# A rate of fewer requests is not reliable.
ENDS_NEEDED = 10


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a good request, in milliseconds; None means no limit.

    ``ttft`` and ``e2el`` are compared with the latencies from the scheduled arrival. Answers of one token meet any
    ``tpot``.
    """

    ttft: Limit | None = None
    tpot: Limit | None = None
    e2el: Limit | None = None


class Distribution(msgspec.Struct, frozen=True):
    """A latency over ``count`` observations, in seconds; ``std`` is that of the population."""

    count: int
    mean: float
    std: float
    p50: float
    p90: float
    p99: float
    max: float

    @staticmethod
    def of(values: ArrayLike) -> Distribution | None:
        """The distribution of all values that are not NaN, None if there are none."""
        found: Floats = np.asarray(values, dtype=np.float64)
        found = found[~np.isnan(found)]
        if not found.size:
            return None
        p50, p90, p99 = (float(value) for value in np.percentile(found, (50, 90, 99)))
        return Distribution(
            found.size, float(found.mean()), float(found.std()), p50, p90, p99, float(found.max())
        )  # fmt: skip

    def flat(self, name: str) -> dict[str, float]:
        """``{"mean_ttft_ms": ..., "median_ttft_ms": ..., "p99_ttft_ms": ...}``, in milliseconds."""
        values = {
            "mean": self.mean,
            "std": self.std,
            "median": self.p50,
            "p90": self.p90,
            "p99": self.p99,
            "max": self.max,
        }
        return {f"{key}_{name}_ms": value * MS for key, value in values.items()}


@dataclass(frozen=True)
class Samples:
    """A run as columns, one entry per request, times in seconds; ``first`` and ``last`` are NaN for failed ones.

    ``itl`` holds the gaps of all successful requests, one after the other. ``failures`` counts failed requests by
    kind; their ``ok`` is false. Large simulations fill these columns directly.
    """

    scheduled: Floats
    sent: Floats
    first: Floats
    last: Floats
    input_tokens: Floats
    output_tokens: Floats
    ok: NDArray[np.bool_]
    itl: Floats
    ended: Floats
    failures: Mapping[str, int] = field(default_factory=dict[str, int])

    @staticmethod
    def of(records: Iterable[RequestRecord]) -> Samples:
        """The columns of all records except warm-up, in order."""
        kept = [record for record in records if not record.warmup]
        nan = float("nan")
        gaps = [np.diff(np.asarray(record.token_times, dtype=np.float64)) for record in kept if record.ok]
        return Samples(
            scheduled=_column(record.scheduled for record in kept),
            sent=_column(record.sent for record in kept),
            first=_column(
                record.first_token if record.ok and record.first_token is not None else nan for record in kept
            ),
            last=_column(record.end if record.ok else nan for record in kept),
            input_tokens=_column(record.input_tokens for record in kept),
            output_tokens=_column(record.output_tokens for record in kept),
            ok=np.array([record.ok for record in kept], dtype=np.bool_),
            itl=np.concatenate(gaps) if gaps else np.empty(0),
            ended=_column(record.end for record in kept),
            failures=Counter(record.failure or "empty" for record in kept if not record.ok),
        )

    @property
    def ttft(self) -> Floats:
        """Time to first token from the send, per request."""
        return self.first - self.sent

    @property
    def e2el(self) -> Floats:
        """End-to-end latency from the send, per request."""
        return self.last - self.sent

    @property
    def tpot(self) -> Floats:
        """(E2EL - TTFT) / (output tokens - 1), per request; NaN for answers of fewer than two tokens."""
        steps = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return (self.last - self.first) / steps

    @property
    def ttft_scheduled(self) -> Floats:
        """Time to first token from the scheduled arrival, per request."""
        return self.first - self.scheduled

    @property
    def e2el_scheduled(self) -> Floats:
        """End-to-end latency from the scheduled arrival, per request."""
        return self.last - self.scheduled

    @property
    def steady_window(self) -> tuple[float, float] | None:
        """From the first request that ended until the last one was due: the target neither fills nor drains in it.

        None if fewer than :data:`ENDS_NEEDED` requests ended in it.
        """
        if not self.ended.size:
            return None
        begin, end = float(self.ended.min()), float(self.scheduled.max())
        within = (self.ended > begin) & (self.ended <= end)
        return (begin, end) if int(within.sum()) >= ENDS_NEEDED else None

    def steady_rate(self, which: NDArray[np.bool_]) -> float | None:
        """How many of these requests ended per second of :attr:`steady_window`."""
        window = self.steady_window
        if window is None:
            return None
        begin, end = window
        return int((which & (self.ended > begin) & (self.ended <= end)).sum()) / (end - begin)

    def meets(self, slo: Slo) -> NDArray[np.bool_]:
        """Which requests succeeded within every limit of ``slo``."""
        limits = ((slo.ttft, self.ttft_scheduled), (slo.e2el, self.e2el_scheduled), (slo.tpot, self.tpot))
        good = self.ok.copy()
        for limit, values in limits:
            if limit is not None:
                good &= within(values * MS, limit)
        return good


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run in numbers; throughput per second, latencies in seconds, None where no request had one.

    ``duration`` runs from the first scheduled arrival to the end of the last request. ``request_goodput`` counts
    requests per second that kept the SLO; None without one. Both rates of ``vllm bench serve`` count the drain at the
    end as well; ``steady_throughput`` and ``steady_goodput`` count in :attr:`Samples.steady_window` alone, and are None
    if that has too few requests. ``attainment`` is the share of all requests that kept the SLO. ``failed`` counts what
    the target failed; requests that were under way when the run was interrupted are in ``interrupted`` instead.
    ``itl`` is between events of a stream:
    one that carries several tokens makes one gap, as in ``vllm bench serve``.
    """

    completed: int
    failed: int
    interrupted: int
    errors: Mapping[str, int]
    duration: float
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None
    steady_throughput: float | None = None
    steady_goodput: float | None = None
    attainment: float | None = None
    max_concurrent_requests: int
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2el: Distribution | None
    ttft_scheduled: Distribution | None
    e2el_scheduled: Distribution | None
    send_delay: Distribution | None

    def flat(self) -> dict[str, float | int | None]:
        """All values under the flat names that ``vllm bench serve`` writes, latencies in milliseconds.

        In addition to its names: ``interrupted``, ``steady_throughput``, ``steady_goodput``, ``*_ttft_scheduled_ms``,
        ``*_e2el_scheduled_ms`` (from the scheduled arrival) and ``*_send_delay_ms`` (from the scheduled arrival to the
        send).
        """
        found: dict[str, float | int | None] = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, Distribution):
                found |= value.flat(name)
            elif name not in _DISTRIBUTIONS and name != "errors":
                found[name] = value
        return found


def achieved(metrics: Mapping[str, float | int | None], name: str) -> float | None:
    """The rate ``throughput`` or ``goodput`` of :meth:`Summary.flat`: in the steady window, or of the whole run."""
    if metrics.get(f"request_{name}") is None:
        return None
    steady = metrics.get(f"steady_{name}")
    return metrics.get(f"request_{name}") if steady is None else steady


def enough(requests: int, statistic: str) -> bool:
    """Whether this number of requests is enough for the statistic, such as ``p99``."""
    return requests >= REQUESTS_NEEDED.get(statistic, 1)


_DISTRIBUTIONS = ("ttft", "tpot", "itl", "e2el", "ttft_scheduled", "e2el_scheduled", "send_delay")


def summarize(run: Samples | Iterable[RequestRecord], slo: Slo | None = None) -> Summary:
    """The summary of a run."""
    samples = run if isinstance(run, Samples) else Samples.of(run)
    done = samples.ok
    duration = float(samples.ended.max() - samples.scheduled.min()) if done.size else 0.0
    completed = int(done.sum())
    tokens_in, tokens_out = int(samples.input_tokens[done].sum()), int(samples.output_tokens[done].sum())
    interrupted = samples.failures.get(INTERRUPTED, 0)
    return Summary(
        completed=completed,
        failed=int(done.size) - completed - interrupted,
        interrupted=interrupted,
        errors=dict(sorted(samples.failures.items())),
        duration=duration,
        total_input_tokens=tokens_in,
        total_output_tokens=tokens_out,
        request_throughput=_rate(completed, duration),
        output_throughput=_rate(tokens_out, duration),
        total_token_throughput=_rate(tokens_in + tokens_out, duration),
        request_goodput=None if slo is None else _rate(int(samples.meets(slo).sum()), duration),
        steady_throughput=samples.steady_rate(done),
        steady_goodput=None if slo is None else samples.steady_rate(samples.meets(slo)),
        attainment=float(samples.meets(slo).mean()) if slo is not None and done.size else None,
        max_concurrent_requests=most_at_once(samples.sent, samples.ended),
        ttft=Distribution.of(samples.ttft),
        tpot=Distribution.of(samples.tpot),
        itl=Distribution.of(samples.itl),
        e2el=Distribution.of(samples.e2el),
        ttft_scheduled=Distribution.of(samples.ttft_scheduled),
        e2el_scheduled=Distribution.of(samples.e2el_scheduled),
        send_delay=Distribution.of(samples.sent - samples.scheduled),
    )


def most_at_once(begins: Floats, ends: Floats) -> int:
    """The largest number of half-open intervals ``[begin, end)`` that overlap anywhere."""
    if not begins.size:
        return 0
    times = np.concatenate([ends, begins])
    steps = np.concatenate([np.full(ends.size, -1), np.full(begins.size, 1)])
    # A stable sort keeps ends before beginnings of the same moment.
    return max(0, int(np.cumsum(steps[np.argsort(times, kind="stable")]).max()))


def _column(values: Iterable[float]) -> Floats:
    return np.fromiter(values, dtype=np.float64)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
