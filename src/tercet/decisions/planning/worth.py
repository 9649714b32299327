"""Which fleet is worth its engines where none meets the objectives."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tercet.decisions.planning.candidates import EngineDemand, best_split
from tercet.decisions.planning.observed import Expected, FleetPlan, PlanLimits

PRICE = 0.5
"""What one more engine must bring within the objectives, as a share of what each engine of the best fleet brings."""
MOST_WORK = 1.2
"""Load of the busier role by the estimate, from which on a fleet is too small to be worth a simulation."""
LEAST_WORK = 0.5
"""The same, below which it is too large."""

Simulated = tuple[FleetPlan, Expected]


def worths(simulated: Sequence[Simulated]) -> list[float]:
    """For each fleet the share of the requests within the objectives, less the price of its engines.

    The price is half of what an engine brings in the fleet that serves most per engine: a larger fleet must bring that
    much for each further engine. So the largest fleet is not taken for a few requests more, and what cannot be met is
    no reason to give up engines that serve many.
    """
    price = PRICE * max(got.attainment / plan.engines for plan, got in simulated)
    return [got.attainment - price * plan.engines for plan, got in simulated]


def worth_simulating(now: FleetPlan, demand: EngineDemand, limits: PlanLimits, most: int) -> list[FleetPlan]:
    """At most ``most`` fleets other than ``now``: the best split of sizes about the demand, and splits near now's."""
    sizes = [size for size in range(limits.fewest, limits.most + 1)
             if LEAST_WORK <= demand.share(best_split(size, demand)) <= MOST_WORK]  # fmt: skip
    middle = min(max(math.ceil(demand.prefill + demand.decode), limits.fewest), limits.most)
    near = sorted({*sizes, now.engines - 1, now.engines, now.engines + 1}, key=lambda size: (abs(size - middle), size))
    plans = [best_split(size, demand) for size in near if limits.fewest <= size <= limits.most]
    split = best_split(now.engines, demand)
    beside = [FleetPlan(each.prefill + by, each.decode - by) for each in (now, split) for by in (1, -1)]
    kept = dict.fromkeys(plan for plan in (*plans[: most - 2], *beside, *plans) if limits.allow(plan) and plan != now)
    return list(kept)[:most]
