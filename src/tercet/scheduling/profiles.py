"""Profiles: filters, then weighted scorers, then a picker; and all profiles and deciders of one scheduling file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tercet.protocol import BadRequest, EngineUnreachable, Role
from tercet.scheduling.deciders import AlwaysDisaggregate
from tercet.scheduling.decision import Decision
from tercet.scheduling.engine_columns import Engines, Floats
from tercet.scheduling.plugin import Decider, Filter, Picker, Plugin, Scorer

SCHEDULED = "scheduled"
"""As ``by`` of a pick: the profile that the handler has for the role."""


@dataclass(frozen=True)
class Weighted:
    """A scorer and how much it counts."""

    scorer: Scorer
    weight: float


@dataclass(frozen=True)
class SchedulingProfile:
    """How to pick an engine for one purpose; filters and scorers run in the order given."""

    name: str
    filters: Sequence[Filter]
    scorers: Sequence[Weighted]
    picker: Picker

    def pick(self, decision: Decision, engines: Engines) -> int:
        """The row of the engine to take; ``engines`` are at least one.

        Raises :class:`~tercet.protocol.EngineUnreachable` if a strict filter leaves none.
        """
        left = self._filtered(decision, engines)
        chosen = int(left.rows[self.picker.pick(decision, left, self._scores(decision, left))])
        for plugin in self._plugins:
            plugin.picked(decision, chosen)
        return chosen

    def _filtered(self, decision: Decision, engines: Engines) -> Engines:
        for plugin in self.filters:
            left = engines.where(plugin.keep(decision, engines))
            if len(left):
                engines = left
            elif plugin.strict:
                raise EngineUnreachable(
                    f"the profile {self.name!r} finds no engine: {type(plugin).__name__} leaves out all {len(engines)}"
                )
        return engines

    def _scores(self, decision: Decision, engines: Engines) -> Floats:
        total = np.zeros(len(engines))
        for weighted in self.scorers:
            given = np.asarray(weighted.scorer.score(decision, engines), dtype=np.float64)
            if given.shape != total.shape:
                kind = type(weighted.scorer).__name__
                raise ValueError(f"{kind} gave scores of shape {given.shape} for {len(engines)} engines")
            total += weighted.weight * np.fmin(np.fmax(given, 0.0), 1.0)  # these two leave NaN behind
        return total

    @property
    def _plugins(self) -> Sequence[Plugin]:
        return (*self.filters, *(weighted.scorer for weighted in self.scorers), self.picker)


@dataclass(frozen=True)
class Scheduling:
    """How a fleet picks engines.

    ``by_role`` says which profile serves a role; ``decider`` whether a second engine shall prefill.
    """

    profiles: Mapping[str, SchedulingProfile] = field(default_factory=dict[str, SchedulingProfile])
    by_role: Mapping[Role, str] = field(default_factory=dict[Role, str])
    deciders: Mapping[str, Decider] = field(default_factory=dict[str, Decider])
    decider: Decider = field(default_factory=AlwaysDisaggregate)

    def profile(self, by: str, role: Role) -> SchedulingProfile | None:
        """The profile called ``by``, or that of the role if ``by`` is ``scheduled``; None if there is none."""
        return self.profiles.get(self.by_role.get(role, "") if by == SCHEDULED else by)

    def decider_called(self, name: str | None) -> Decider:
        """The decider of that name, or the handler's for None. Raises :class:`~tercet.protocol.BadRequest`."""
        if name is None:
            return self.decider
        found = self.deciders.get(name)
        if found is None:
            known = ", ".join(self.deciders) or "none"
            raise BadRequest(f"by: there is no decider {name!r}; the scheduling file has {known}", "by")
        return found
