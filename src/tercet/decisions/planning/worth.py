"""Which fleet is worth its engines where none meets the objectives."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tercet.decisions.planning.candidates import EngineDemand, best_split
from tercet.decisions.planning.observed import Expected, FleetPlan, PlanLimits

PRICE = 2 / 3
"""What one more engine must bring within the objectives, as a share of what each engine of the best fleet brings."""
STEPS = 8
"""Part of the engines by which neighbours differ, at least one engine."""

Simulated = tuple[FleetPlan, Expected]


def worths(simulated: Sequence[Simulated]) -> list[float]:
    """For each fleet the share of the requests within the objectives, less the price of its engines.

    The price is two thirds of what an engine brings in the fleet that serves most per engine: a larger fleet must bring
    that much for each further engine. So the largest fleet is not taken for a few requests more, and what cannot be met
    is no reason to give up engines that serve many.
    """
    price = PRICE * max(got.attainment / plan.engines for plan, got in simulated)
    return [got.attainment - price * plan.engines for plan, got in simulated]


def worth_simulating(now: FleetPlan, demand: EngineDemand, limits: PlanLimits) -> list[FleetPlan]:
    """Fleets other than ``now`` to begin with: its neighbours, and the one that the estimate would take.

    The estimate may err about a role: neighbours of the present fleet are simulated whatever it says.
    """
    size = min(max(math.ceil(demand.prefill + demand.decode), limits.fewest), limits.most)
    return [each for each in dict.fromkeys((*neighbours(now, limits), best_split(size, demand))) if each != now]


def neighbours(plan: FleetPlan, limits: PlanLimits) -> list[FleetPlan]:
    """The allowed fleets that differ by a step in one role, or by a step of engines that change theirs."""
    step = max(1, plan.engines // STEPS)
    moves = ((-step, 0), (0, -step), (step, -step), (-step, step), (step, 0), (0, step))
    found = [FleetPlan(plan.prefill + prefill, plan.decode + decode) for prefill, decode in moves]
    return [each for each in found if limits.allow(each)]
