"""The decision whether another engine should prefill, by the cost model of the program `auto`, fed with reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tercet.decisions.cost.cost_model import CostModel
from tercet.decisions.cost.costs import RouteCandidate, RouteRequest, Targets, max_tokens_of, pair_pays
from tercet.decisions.cost.engine_work import ReportedWork
from tercet.decisions.scheduling import Engines
from tercet.fleet import EngineFleet, Member
from tercet.protocol import EngineLoad, Request, UnknownEngine

ENOUGH_PREFILLS = 8
"""Number of prefills that must have been timed before costs decide."""
LEAST_GAIN = 0.1
"""Share of the cost that a split must save: reports do not show the cost of transfers."""


class SplitCost:
    """One cost model for the fleet, and the work of each engine, by its reports. ``clock`` is in seconds."""

    def __init__(self, fleet: EngineFleet, clock: Callable[[], float]) -> None:
        self.model = CostModel()
        self.learned = 0
        self._fleet = fleet
        self._clock = clock
        self._works: dict[str, tuple[Member, ReportedWork]] = {}

    @property
    def knows_enough(self) -> bool:
        """True if enough prefills were observed."""
        return self.learned >= ENOUGH_PREFILLS

    def reported(self, name: str, load: EngineLoad) -> None:
        """Record an engine's load report."""
        try:
            work = self._work(self._fleet.member(name))
        except UnknownEngine:  # the engine has just left
            return
        before = work.learned
        work.reported(load)
        self.learned += work.learned - before

    def picked(self, member: Member, request: Request, cached: int) -> None:
        """Record that an engine will prefill a prompt, of which it has an estimated ``cached`` tokens."""
        self._work(member).picked(request.num_tokens, cached)

    def rule_for(self, decode: Member) -> SplitRule:
        """Return the rule for prompts for which ``decode`` is picked."""
        return SplitRule(self, decode)

    def pays(self, request: Request, prefill: str, decode: Member, cached: int) -> bool:
        """True if the engine ``prefill`` should prefill for ``decode``, which has ``cached`` tokens."""
        wanted = RouteRequest(request.num_tokens, self.model.output_of(max_tokens_of(request)), Targets())
        there, here = self._candidate(self._fleet.member(prefill), 0), self._candidate(decode, cached)
        return pair_pays(there, here, wanted, LEAST_GAIN)

    def _candidate(self, member: Member, matched: int) -> RouteCandidate:
        return RouteCandidate(member.name, self._work(member), self.model, self._clock(), matched)

    def _work(self, member: Member) -> ReportedWork:
        known, work = self._works.get(member.name, (None, None))
        if work is None or known is not member:
            work = ReportedWork(self.model, self._clock, lambda: member.kv_tokens)
            self._works[member.name] = member, work
            self._forget_those_that_left()
        return work

    def _forget_those_that_left(self) -> None:
        """Drop engines that have left, when another one joins: each new pod has a new name."""
        here = {id(each) for each in self._fleet.members}
        self._works = {name: found for name, found in self._works.items() if id(found[0]) in here}
        self.model.arrivals.engines = len(self._works)


@dataclass(frozen=True)
class SplitRule:
    """A :class:`~tercet.protocol.PrefillRule`: split if it pays with the engine that has the least prefilling to do."""

    costs: SplitCost
    decode: Member

    def disaggregates(self, request: Request, cached: int, prefill: Engines) -> bool:
        """True if a split pays: see :class:`~tercet.decisions.scheduling.Decider`."""
        idlest = prefill[int(np.nan_to_num(prefill.tokens).argmin())]
        return self.costs.pays(request, idlest.name, self.decode, cached)
