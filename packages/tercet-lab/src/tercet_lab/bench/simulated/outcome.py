"""The outcome of one simulated run: times and tokens of each measured request, and counters of the engines."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from tercet.fleet import Trace
from tercet.protocol import Request, TercetError
from tercet.protocol.trace import FALLBACK, RETRY
from tercet.router.page.records import Frame
from tercet.settings.role_settings import ObjectiveClass, Objectives
from tercet_lab.bench.simulated.kv_imbalance import KVImbalance
from tercet_lab.bench.simulated.moving_fleet import MoveTotals
from tercet_lab.bench.simulated.request_classes import ClassedSamples
from tercet_lab.bench.simulated.virtual_roles import VirtualFlip


@dataclass
class Outcome:
    """The results of one run: columns with one entry per measured request, and the engines' counters.

    Times are in seconds of virtual time; ``first`` is NaN for a failed request. ``busy`` is the share of the engines'
    time in which a step ran. ``timeline`` is empty unless it was requested.
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
