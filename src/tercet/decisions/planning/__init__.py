"""The number of engines that a fleet needs, by role. Pure: observed traffic in, a wanted fleet and the reason out."""

from tercet.decisions.planning.arrivals import ObservedRequest, answers_completed
from tercet.decisions.planning.candidates import EngineCapacity, candidates
from tercet.decisions.planning.observed import Expected, FleetPlan, Observed, PlanLimits, Policy, WantedPlan
from tercet_lab.planning.forecast import Forecast, Forecaster
from tercet_lab.planning.planner import Planner
from tercet_lab.planning.remembered import Verdict

__all__ = [
    "EngineCapacity",
    "Expected",
    "FleetPlan",
    "Forecast",
    "Forecaster",
    "Observed",
    "ObservedRequest",
    "PlanLimits",
    "Planner",
    "Policy",
    "Verdict",
    "WantedPlan",
    "answers_completed",
    "candidates",
]
