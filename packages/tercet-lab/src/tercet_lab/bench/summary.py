"""The metrics of records: latencies, throughput and goodput. No I/O.

Names are those of ``vllm bench serve``: TTFT, TPOT, ITL and E2EL (end-to-end latency, also called job completion time,
JCT). They count from the moment at which a request was sent; percentiles interpolate linearly, as in vLLM. The same
latencies are also computed from the moment at which a request was *scheduled*. They include the client's delay and the
wait for a free slot, so a target that stalls cannot hide the requests that were sent late because of it.

Failed requests have no latency: they count in ``failed`` and ``errors``, and reduce goodput.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from tercet.decisions.objectives import within
from tercet_lab.bench.results import RequestRecord

Floats = NDArray[np.float64]
Limit = Annotated[float, msgspec.Meta(gt=0)]
MS = 1000.0
INTERRUPTED = "interrupted"
# With this number of requests, one is expected above the percentile; with fewer, the percentile is only the maximum.
REQUESTS_NEEDED = {"p90": 10, "p99": 100}
# A rate over fewer requests is not reliable.
ENDS_NEEDED = 10


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of a good request, in milliseconds; None means no limit.

    ``ttft`` and ``e2el`` limit the latencies from the scheduled arrival. An answer of one token meets any ``tpot``.
    """

    ttft: Limit | None = None
    tpot: Limit | None = None
    e2el: Limit | None = None


class Distribution(msgspec.Struct, frozen=True):
    """The distribution of a latency over ``count`` observations, in seconds. ``std`` is of the population."""

    count: int
    mean: float
    std: float
    p50: float
    p90: float
    p99: float
    max: float

    @staticmethod
    def of(values: ArrayLike) -> Distribution | None:
        """Return the distribution of all values that are not NaN, or None without such values."""
        found: Floats = np.asarray(values, dtype=np.float64)
        found = found[~np.isnan(found)]
        if not found.size:
            return None
        p50, p90, p99 = (float(value) for value in np.percentile(found, (50, 90, 99)))
        return Distribution(
            found.size, float(found.mean()), float(found.std()), p50, p90, p99, float(found.max())
        )  # fmt: skip

    def flat(self, name: str) -> dict[str, float]:
        """Return ``{"mean_ttft_ms": ..., "median_ttft_ms": ..., "p99_ttft_ms": ...}`` for ``ttft``, in milliseconds."""
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
    """The requests of a run as columns, one entry per request, with times in seconds.

    ``first`` and ``last`` are NaN for failed requests, and ``ok`` is false; ``failures`` counts them by kind. ``itl``
    has the gaps of all successful requests, one after the other. Large simulations fill these columns directly.
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
        """Return the columns of all records except warm-up, in order."""
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
        """Time from the send to the first token, per request, in seconds."""
        return self.first - self.sent

    @property
    def e2el(self) -> Floats:
        """End-to-end latency from the send, per request, in seconds."""
        return self.last - self.sent

    @property
    def tpot(self) -> Floats:
        """(E2EL - TTFT) / (output tokens - 1) per request, in seconds; NaN for answers of fewer than two tokens."""
        steps = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return (self.last - self.first) / steps

    @property
    def ttft_scheduled(self) -> Floats:
        """Time from the scheduled arrival to the first token, per request, in seconds."""
        return self.first - self.scheduled

    @property
    def e2el_scheduled(self) -> Floats:
        """End-to-end latency from the scheduled arrival, per request, in seconds."""
        return self.last - self.scheduled

    @property
    def steady_window(self) -> tuple[float, float] | None:
        """Time from the first end of a request to the last scheduled arrival, as (begin, end) in seconds.

        In this window the target neither fills nor drains. None if fewer than :data:`ENDS_NEEDED` requests ended in it.
        """
        if not self.ended.size:
            return None
        begin, end = float(self.ended.min()), float(self.scheduled.max())
        within = (self.ended > begin) & (self.ended <= end)
        return (begin, end) if int(within.sum()) >= ENDS_NEEDED else None

    def steady_rate(self, which: NDArray[np.bool_]) -> float | None:
        """Return the number of these requests that ended per second of :attr:`steady_window`; None without a window."""
        window = self.steady_window
        if window is None:
            return None
        begin, end = window
        return int((which & (self.ended > begin) & (self.ended <= end)).sum()) / (end - begin)

    def meets(self, slo: Slo) -> NDArray[np.bool_]:
        """Return, for each request, True if it succeeded within every limit of ``slo``."""
        limits = ((slo.ttft, self.ttft_scheduled), (slo.e2el, self.e2el_scheduled), (slo.tpot, self.tpot))
        good = self.ok.copy()
        for limit, values in limits:
            if limit is not None:
                good &= within(values * MS, limit)
        return good


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of one run: throughput per second, and latencies in seconds (None if no request has one).

    ``duration`` is the time from the first scheduled arrival to the end of the last request. ``request_goodput`` is the
    number of requests per second that met the SLO; None without an SLO. These two rates of ``vllm bench serve``,
    ``request_throughput`` and ``request_goodput``, include the drain at the end. ``steady_throughput`` and
    ``steady_goodput`` count in :attr:`Samples.steady_window` only, and are None if it has too few requests.
    ``attainment`` is the share of all requests that met the SLO. ``failed`` counts failures of the target; requests in
    flight when the run was interrupted are in ``interrupted`` instead. ``itl`` is the gap between events of a stream:
    an event with several tokens makes one gap, as in ``vllm bench serve``.
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
        """Return all values under the flat names of ``vllm bench serve``, latencies in milliseconds.

        Names that vLLM does not have: ``interrupted``, ``steady_throughput``, ``steady_goodput``, ``attainment``,
        ``*_ttft_scheduled_ms`` and ``*_e2el_scheduled_ms`` (from the scheduled arrival), and ``*_send_delay_ms`` (from
        the scheduled arrival to the send).
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
    """Return the rate ``throughput`` or ``goodput`` in the steady window, or of the whole run without a window.

    ``metrics`` are those of :meth:`Summary.flat`. None if they do not have the rate.
    """
    if metrics.get(f"request_{name}") is None:
        return None
    steady = metrics.get(f"steady_{name}")
    return metrics.get(f"request_{name}") if steady is None else steady


def enough(requests: float, statistic: str) -> bool:
    """True if this number of requests is enough for the statistic, such as ``p99``."""
    return requests >= REQUESTS_NEEDED.get(statistic, 1)


_DISTRIBUTIONS = ("ttft", "tpot", "itl", "e2el", "ttft_scheduled", "e2el_scheduled", "send_delay")


def summarize(run: Samples | Iterable[RequestRecord], slo: Slo | None = None) -> Summary:
    """Return the summary of a run; ``slo`` (None: no limits) defines goodput."""
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
    """Return the largest number of half-open intervals ``[begin, end)`` that overlap at one moment."""
    if not begins.size:
        return 0
    times = np.concatenate([ends, begins])
    steps = np.concatenate([np.full(ends.size, -1), np.full(begins.size, 1)])
    # A stable sort puts ends before beginnings of the same moment.
    return max(0, int(np.cumsum(steps[np.argsort(times, kind="stable")]).max()))


def _column(values: Iterable[float]) -> Floats:
    return np.fromiter(values, dtype=np.float64)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


FIGURES = 3


def three_digits(value: float | None) -> str:
    """Return a number with three significant figures and without an exponent; an empty text for None."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = round(value, _places(value))
    return f"{rounded:.{max(0, _places(rounded))}f}"


def _places(value: float) -> int:
    """Return the number of decimal places for three significant figures; it is negative for large numbers."""
    return FIGURES - 1 - math.floor(math.log10(abs(value)))
