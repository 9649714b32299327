"""The outcome of one simulated run: times and tokens of each measured request, and counters of the engines.

With them the imbalance of KV usage between engines over time, and what a planner changed and what its engines cost.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tercet.fleet import Trace
from tercet.protocol import Request, TercetError
from tercet.protocol.spans import FALLBACK, RETRY
from tercet.router.page.records import Frame
from tercet.settings.fleet_settings import ObjectiveClass, Objectives
from tercet_lab.bench.simulated.moving_fleet import MoveTotals, VirtualFlip
from tercet_lab.bench.simulated.scenario import ClassedSamples
from tercet_lab.sim import SimEngine


class PlannedChange(msgspec.Struct, frozen=True):
    """One change by a planner, ``at`` a time of the run in seconds: the new plan, its effects and its reason.

    ``flipped``, ``started`` and ``stopped`` are numbers of engines.
    """

    at: float
    plan: str
    flipped: int
    started: int
    stopped: int
    reason: str


class FleetSample(msgspec.Struct, frozen=True):
    """The state of the fleet ``at`` a time of the run, in seconds.

    ``rate`` is arrivals per second, ``waiting_s`` the seconds of prefill that wait. ``ended`` requests ended in the
    second before; ``met`` of them met the objectives.
    """

    at: float
    prefill: int
    decode: int
    starting: int
    rate: float
    waiting_s: float
    running: int
    ended: int
    met: int


class PlannedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a planner in a run.

    ``engine_seconds`` is the cost of the engines, from the order to start each one to its end. For its ``decisions``,
    the planner ran ``simulations`` with ``simulated_requests`` requests in total.
    """

    changes: tuple[PlannedChange, ...] = ()
    samples: tuple[FleetSample, ...] = ()
    engine_seconds: float = 0.0
    decisions: int = 0
    simulations: int = 0
    simulated_requests: int = 0

    @property
    def flips(self) -> int:
        """Number of changes in which engines changed their roles."""
        return sum(each.flipped > 0 for each in self.changes)

    def flat(self, met: int) -> dict[str, float]:
        """Return the values by name, for a report. ``met`` is the number of requests that met the objectives."""
        hours = self.engine_seconds / 3600
        return {
            "planner_changes": len(self.changes),
            "planner_flips": self.flips,
            "engines_flipped": sum(each.flipped for each in self.changes),
            "engines_started": sum(each.started for each in self.changes),
            "engines_stopped": sum(each.stopped for each in self.changes),
            "planner_decisions": self.decisions,
            "planner_simulations": self.simulations,
            "engine_hours": hours,
            "goodput_per_engine_hour": met / hours if hours else 0.0,
        }


class PaidTime:
    """The time for which each engine costs something: a planner's engines only from the order to start to their end.

    Shares and means of a run are over this time: engines that a planner never started would dilute them.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._since = dict.fromkeys(names, 0.0)
        self._seconds = 0.0

    def begin(self, name: str, now: float) -> None:
        """Pay for an engine from the second ``now``."""
        self._since[name] = now

    def end(self, name: str, now: float) -> None:
        """Pay for an engine no longer, from the second ``now``."""
        self._seconds += now - self._since.pop(name)

    def __contains__(self, name: str) -> bool:
        return name in self._since

    def seconds(self, now: float) -> float:
        """Return the paid engine-seconds until the second ``now``."""
        return self._seconds + sum(now - since for since in self._since.values())


SAMPLE_SECONDS, OFTEN = 0.1, 100


class KVImbalance(msgspec.Struct, frozen=True, kw_only=True):
    """The KV usage of the fullest engine minus the mean over all paid engines, as shares of a KV cache (0 to 1).

    ``mean`` and ``p95`` are over samples every :data:`SAMPLE_SECONDS` seconds from the first arrival to the last one:
    the drain at the end is not a load to balance. With more than :data:`OFTEN` engines, samples are less frequent, so
    that they cost no more. ``usage`` is the mean KV usage of the paid engines over the same time.
    """

    mean: float
    p95: float
    usage: float

    def flat(self) -> dict[str, float]:
        """Return the values by name, for a report."""
        return {"mean_kv_imbalance": self.mean, "p95_kv_imbalance": self.p95, "mean_kv_usage": self.usage}


class ImbalanceSamples:
    """The sampling of all engines at regular intervals, until ``over`` is set."""

    def __init__(self, engines: Mapping[str, SimEngine], paid: PaidTime) -> None:
        self._engines, self._paid = engines, paid
        self._imbalances = array("d")
        self._usages = array("d")
        self.over = False

    async def take(self) -> None:
        """Take samples until cancelled, or until ``over`` is set."""
        interval = SAMPLE_SECONDS * max(1.0, len(self._engines) / OFTEN)
        while not self.over:
            paid = self._paid
            if usages := [engine.kv_usage for name, engine in self._engines.items() if name in paid]:
                mean = sum(usages) / len(usages)
                self._imbalances.append(max(usages) - mean)
                self._usages.append(mean)
            await asyncio.sleep(interval)

    def summary(self) -> KVImbalance | None:
        """Return the result, or None without samples."""
        if not self._imbalances:
            return None
        found = np.array(self._imbalances)
        return KVImbalance(
            mean=float(found.mean()), p95=float(np.percentile(found, 95)), usage=float(np.mean(self._usages))
        )


@dataclass
class Outcome:
    """The results of one run: columns with one entry per measured request, and the engines' counters.

    Times are in seconds of virtual time; ``first`` is NaN for a failed request. ``busy`` is the share of the
    engines' paid time in which a step ran. ``timeline`` is empty unless it was requested.
    """

    sent: array[float] = field(default_factory=lambda: array("d"))
    first: array[float] = field(default_factory=lambda: array("d"))
    ended: array[float] = field(default_factory=lambda: array("d"))
    input_tokens: array[float] = field(default_factory=lambda: array("d"))
    output_tokens: array[float] = field(default_factory=lambda: array("d"))
    failures: Counter[str] = field(default_factory=Counter[str])
    first_error: TercetError | None = None
    fallbacks: int = 0
    retries: int = 0
    first_retried: str | None = None
    busy: float = 0.0
    counts: dict[str, int] = field(default_factory=dict[str, int])
    moves: MoveTotals = field(default_factory=MoveTotals)
    imbalance: KVImbalance | None = None
    flips: list[VirtualFlip] = field(default_factory=list[VirtualFlip])
    timeline: list[Frame] = field(default_factory=list[Frame])
    objectives: Objectives = field(default_factory=Objectives)
    classes: list[ObjectiveClass | None] = field(default_factory=list[ObjectiveClass | None])

    def add(self, sent: float, first: float, ended: float, request: Request, tokens: int) -> None:
        """Record a request with its times in seconds; ``first`` is NaN if it failed."""
        self.sent.append(sent)
        self.first.append(first)
        self.ended.append(ended)
        self.input_tokens.append(request.num_tokens)
        self.output_tokens.append(tokens)
        if self.objectives.classes:
            self.classes.append(self.objectives.class_of(request.headers))

    def count_attempts(self, trace: Trace) -> None:
        """Count the attempts after failures in a request's trace."""
        for event in trace.events:
            if event.verb in (RETRY, FALLBACK):
                self.retries += 1
                self.fallbacks += event.verb == FALLBACK
                self.first_retried = self.first_retried or event.reason

    def samples(self) -> ClassedSamples:
        """Return the requests in the benchmark's form, without gaps between tokens, which are not stored."""
        sent, first, ended = np.array(self.sent), np.array(self.first), np.array(self.ended)
        ok = ~np.isnan(first)
        return ClassedSamples(
            scheduled=sent,
            sent=sent,
            first=first,
            last=np.where(ok, ended, np.nan),
            input_tokens=np.array(self.input_tokens),
            output_tokens=np.array(self.output_tokens),
            ok=ok,
            itl=np.empty(0),
            ended=ended,
            failures=self.failures,
            classes=tuple(self.classes),
        )
