"""What a planner did in a simulated run, and what it cost."""

from __future__ import annotations

import msgspec


class PlannedChange(msgspec.Struct, frozen=True):
    """What a planner did ``at`` a second of the run: the fleet from then on, how, and why."""

    at: float
    plan: str
    flipped: int
    started: int
    stopped: int
    reason: str


class FleetSample(msgspec.Struct, frozen=True):
    """The fleet at a second of the run. ``rate`` are arrivals per second, ``waiting_s`` seconds of prefill in line.

    ``met`` of ``ended`` requests that ended in the second before met the objectives.
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
    """What a planner did in a run, and what the engines cost: ``engine_seconds`` from their start's order to their end.

    ``simulations`` with ``simulated_requests`` were made for its decisions.
    """

    changes: tuple[PlannedChange, ...] = ()
    samples: tuple[FleetSample, ...] = ()
    engine_seconds: float = 0.0
    decisions: int = 0
    simulations: int = 0
    simulated_requests: int = 0

    @property
    def flips(self) -> int:
        """Changes in which engines changed their roles."""
        return sum(each.flipped > 0 for each in self.changes)

    def flat(self, met: int) -> dict[str, float]:
        """By name, for a report; ``met`` requests met the objectives."""
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
