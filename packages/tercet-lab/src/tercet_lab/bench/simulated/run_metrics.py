"""The metrics of runs by name: the same in sweeps, tables, figures and the search of a rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tercet.protocol import BadRequest
from tercet.settings.declaration import near
from tercet_lab.bench.results import achieved, enough
from tercet_lab.bench.simulated.simulation import SimulatedPoint

if TYPE_CHECKING:
    from tercet_lab.bench.simulated.experiment import Run

    Measured = Run | SimulatedPoint

LATENCIES: Mapping[str, str] = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "JCT", "itl": "ITL"}
STATISTICS = ("mean", "p50", "p90", "p99")
Unit = Literal["s", "share", "requests/s", ""]


@dataclass(frozen=True)
class Metric:
    """A metric of a run: its name, its words and unit on an axis, and whether more is better."""

    name: str
    words: str
    unit: Unit
    more: bool
    of: Callable[[Measured], float | None]
    needs_slo: bool = False

    @property
    def statistic(self) -> str:
        """The statistic of a latency, such as ``p99``; empty for other metrics."""
        return self.name.partition(".")[2]

    @property
    def sign(self) -> float:
        """The factor with which smaller values are better."""
        return -1.0 if self.more else 1.0

    def value(self, of: Measured) -> float:
        """Return the value of a run in seconds, shares (0 to 1), requests per second, hours or numbers.

        It is NaN if the run does not have it. A latency is infinite if a request failed.
        """
        found = self.of(of)
        return math.nan if found is None else float(found)

    def require(self, requests: float = math.inf, slo: bool = True) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` if runs with this number of requests do not have it."""
        if self.needs_slo and not slo:
            raise BadRequest(f"metric: {self.name} needs limits; give an SLO", "metric")
        if not enough(requests, self.statistic):
            raise BadRequest(
                f"metric: {self.name}: {requests:g} requests are too few for this percentile; compare "
                f"{self.name.partition('.')[0]}.mean, or simulate more", "metric",
            )  # fmt: skip


def metric_of(name: str) -> Metric:
    """Return the metric of a name; raise :class:`~tercet.protocol.BadRequest` with a suggestion for an unknown one."""
    if name not in METRICS:
        raise BadRequest(f"metric: {name!r} is unknown; {near(name.lower(), list(METRICS))}", "metric")
    return METRICS[name]


def _latency(latency: str, statistic: str) -> Metric:
    def of(run: Measured) -> float | None:
        found = getattr(run.summary, latency)
        if run.summary.failed:
            return math.inf
        return None if found is None or not enough(found.count, statistic) else getattr(found, statistic)

    words = f"{statistic if statistic == 'mean' else statistic.upper()} {LATENCIES[latency]}"
    return Metric(f"{latency}.{statistic}", words, "s", False, of)


def _per_engine_hour(run: Measured) -> float | None:
    summary = run.summary
    if summary.attainment is None or not run.engine_hours > 0:
        return None
    return summary.attainment * (summary.completed + summary.failed) / run.engine_hours


def _counter(
    name: str, words: str, of: Callable[[SimulatedPoint], float | None], unit: Unit = "", *, more: bool = False
) -> Metric:
    """Return a metric that only simulated runs have."""

    def value(run: Measured) -> float | None:
        point = run if isinstance(run, SimulatedPoint) else run.point
        return None if point is None else of(point)

    return Metric(name, words, unit, more, value)


METRICS: Mapping[str, Metric] = {
    each.name: each
    for each in (
        *(_latency(latency, statistic) for latency in LATENCIES for statistic in STATISTICS),
        Metric("goodput", "goodput", "requests/s", True, lambda run: achieved(run.summary.flat(), "goodput"), True),
        Metric("throughput", "completed", "requests/s", True, lambda run: achieved(run.summary.flat(), "throughput")),
        Metric("attainment", "SLO attainment", "share", True, lambda run: run.summary.attainment, True),
        Metric("engine_hours", "engine-hours", "", False, lambda run: run.engine_hours),
        Metric("goodput_per_engine_hour", "good requests per engine-hour", "", True, _per_engine_hour, True),
        _counter("imbalance", "imbalance of KV usage", lambda of: of.imbalance and of.imbalance.mean, "share"),
        _counter("kv_usage", "KV usage", lambda of: of.imbalance and of.imbalance.usage, "share"),
        _counter("busy", "busy engines", lambda of: of.busy, "share"),
        _counter("preemptions", "preemptions", lambda of: of.counts["preemptions"]),
        _counter("moved", "moves", lambda of: of.moves.moved),
    )
}
