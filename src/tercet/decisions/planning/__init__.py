"""The number of engines that a fleet needs, by role. Pure: observed traffic in, a wanted fleet and the reason out."""

from tercet.decisions.planning.candidates import EngineCapacity, candidates
from tercet.decisions.planning.observed import (
    Expected,
    FleetPlan,
    Observed,
    ObservedRequest,
    PlanLimits,
    Policy,
    WantedPlan,
    answers_completed,
)

__all__ = [
    "EngineCapacity",
    "Expected",
    "FleetPlan",
    "Observed",
    "ObservedRequest",
    "PlanLimits",
    "Policy",
    "WantedPlan",
    "answers_completed",
    "candidates",
]
