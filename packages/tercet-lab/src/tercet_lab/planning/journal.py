"""The last plans of a planner, in the form of its report to the router."""

from __future__ import annotations

from collections import deque

import msgspec

from tercet.decisions.planning import FleetPlan, WantedPlan
from tercet.decisions.planning.observed import PlannerReport, ReportedPlan
from tercet_lab.planning.acting import FleetChange
from tercet_lab.planning.planner_config import PlannerConfig

KEPT = 40


class PlanJournal:
    """The journal of one planner: its last :data:`KEPT` plans."""

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._plans: deque[ReportedPlan] = deque(maxlen=KEPT)

    def came(self, share: float | None) -> None:
        """Record the share of requests within the objectives since the last plan; None (no request ended): ignored."""
        if self._plans and share is not None:
            self._plans[-1] = msgspec.structs.replace(self._plans[-1], came=share)

    def note(
        self, at: float, fleet: FleetPlan, wanted: WantedPlan, change: FleetChange, proposal: str = ""
    ) -> None:  # fmt: skip
        """Record a plan made at the Unix time ``at`` for ``fleet``; ``proposal`` is a command for another program."""
        expected = wanted.expected
        self._plans.append(
            ReportedPlan(
                at=at,
                fleet=str(fleet),
                wanted=str(wanted.plan),
                reason=wanted.reason,
                expected=None if expected is None else expected.attainment,
                ttft_p99=None if expected is None else expected.ttft_p99,
                steps=tuple(steps_of(change)),
                proposal=proposal,
            )
        )

    def report(self, margin: float | None) -> PlannerReport:
        """Return the report of the recorded plans; ``margin`` is the planner's present margin, None if unknown."""
        config = self._config
        return PlannerReport(
            act=config.act, planner=config.planner, interval=config.planning.interval_s, margin=margin,
            plans=tuple(self._plans),
        )  # fmt: skip


def steps_of(change: FleetChange) -> list[str]:
    """Return the steps of a change as text: commands that a person can type, and engines to start and stop."""
    flips = [f"tercet engines role {name} {role}" for name, role in change.flips]
    stops = [f"stop {name}" for name in change.stops]
    return [*flips, *(f"start one to {role}" for role in change.starts), *stops]
