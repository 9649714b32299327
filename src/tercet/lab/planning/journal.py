"""What a planner did lately, as it reports it to the router."""

from __future__ import annotations

from collections import deque

import msgspec

from tercet.decisions.planning import FleetPlan, WantedPlan
from tercet.decisions.planning.acting import FleetChange
from tercet.decisions.planning.planner_report import PlannerReport, ReportedPlan
from tercet.settings.planner_config import PlannerConfig

KEPT = 40


class PlanJournal:
    """The last plans of one planner."""

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._plans: deque[ReportedPlan] = deque(maxlen=KEPT)

    def came(self, share: float | None) -> None:
        """That share of the requests since the last plan met the objectives; None if no request ended."""
        if self._plans and share is not None:
            self._plans[-1] = msgspec.structs.replace(self._plans[-1], came=share)

    def note(
        self, at: float, fleet: FleetPlan, wanted: WantedPlan, change: FleetChange, proposal: str = ""
    ) -> None:  # fmt: skip
        """A plan was made at a Unix time for the ``fleet`` as it was; ``proposal`` is the command for a program."""
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
        """All of it."""
        config = self._config
        return PlannerReport(
            act=config.act, planner=config.planner, interval=config.planning.interval_s, margin=margin,
            plans=tuple(self._plans),
        )  # fmt: skip


def steps_of(change: FleetChange) -> list[str]:
    """As commands that a person would type."""
    flips = [f"tercet engines role {name} {role}" for name, role in change.flips]
    stops = [f"stop {name}" for name in change.stops]
    return [*flips, *(f"start one to {role}" for role in change.starts), *stops]
