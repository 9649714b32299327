"""The choice between fleets that all miss the objectives: the worth of a fleet, less the price of its engines."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tercet.decisions.planning.candidates import EngineDemand, best_split
from tercet.decisions.planning.observed import Expected, FleetPlan, PlanLimits

PRICE = 2 / 3
"""Requests within the objectives that one more engine must add, as a share of those per engine of the best fleet."""
STEPS = 8
"""Neighbours differ by the number of engines divided by this, and by at least one engine."""
Simulated = tuple[FleetPlan, Expected]


def worths(simulated: Sequence[Simulated]) -> list[float]:
    """Return for each fleet the share of the requests within the objectives, less the price of its engines.

    The price is two thirds of the share that each engine serves in the fleet that serves most per engine: a larger
    fleet must serve that much more for each added engine. So the planner does not take the largest fleet for a few
    requests more, and does not give up engines that serve many because the objectives are out of reach.
    """
    price = PRICE * max(got.attainment / plan.engines for plan, got in simulated)
    return [got.attainment - price * plan.engines for plan, got in simulated]


def worth_simulating(now: FleetPlan, demand: EngineDemand, limits: PlanLimits) -> list[FleetPlan]:
    """Return the fleets to simulate first, other than ``now``: its neighbours, and the best one by the estimate.

    The estimate may err about a role, so the neighbours of the present fleet are simulated in any case.
    """
    size = min(max(math.ceil(demand.prefill + demand.decode), limits.fewest), limits.most)
    return [each for each in dict.fromkeys((*neighbours(now, limits), best_split(size, demand))) if each != now]


def neighbours(plan: FleetPlan, limits: PlanLimits) -> list[FleetPlan]:
    """Return the allowed fleets that differ by a step of engines in one role, or by a step that changes roles."""
    step = max(1, plan.engines // STEPS)
    moves = ((-step, 0), (0, -step), (step, -step), (-step, step), (step, 0), (0, step))
    found = [FleetPlan(plan.prefill + prefill, plan.decode + decode) for prefill, decode in moves]
    return [each for each in found if limits.allow(each)]
