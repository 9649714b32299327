"""The results of a planner in a simulated run: its changes, and the cost of the engines."""

from __future__ import annotations

import msgspec


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
