"""The fleets that are worth a simulation, by an estimate: few, and the promising ones first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tercet.decisions.planning.arrivals import ObservedRequest
from tercet.decisions.planning.observed import FleetPlan, PlanLimits
from tercet.settings.role_settings import Objectives

STEP_SHARE = 0.9
"""Share of the TPOT objective that a step of decodes may take, in the estimate."""


class EngineCapacity(Protocol):
    """The capacity of one engine, as far as an estimate needs it."""

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds that a prompt of ``tokens`` tokens takes alone."""
        ...

    def decodes(self, context: float, tpot: float) -> int:
        """Return the number of sequences with ``context`` tokens of KV that decode at ``tpot`` s a step; at least 1."""
        ...


@dataclass(frozen=True)
class EngineDemand:
    """The number of engines that a load keeps busy, by role, with fractions."""

    prefill: float
    decode: float

    def share(self, plan: FleetPlan) -> float:
        """Return the load of the busier role of a plan; 1 is the full capacity of its engines."""
        return max(self.prefill / plan.prefill, self.decode / plan.decode)


def longest_step_s(objectives: Objectives) -> float:
    """Return the longest decode step to plan for, in seconds: a share of the objective for TPOT (50 ms without one)."""
    return STEP_SHARE * (objectives.tpot or 0.05)


def most_decodes(step_s: Callable[[int], float], tpot: float, most: int) -> int:
    """Return the most sequences, of at most ``most``, whose step takes at most ``tpot`` seconds; at least 1.

    ``step_s`` returns the seconds of a step of this number of sequences, which are not fewer for more sequences.
    """
    low, high = 1, max(1, most)
    while low < high:
        middle = (low + high + 1) // 2
        if step_s(middle) <= tpot:
            low = middle
        else:
            high = middle - 1
    return low


def demand_of(
    sample: Sequence[ObservedRequest], rate: float, engine: EngineCapacity, objectives: Objectives
) -> EngineDemand:
    """Estimate the demand of requests like ``sample`` at ``rate`` per second.

    Prefill: the seconds of prefill that arrive per second. Decode: by Little's law, the number of sequences that run
    equals the number that arrive in the time that one takes at the objective's TPOT; the steps and the KV cache of an
    engine limit the sequences that it holds.
    """
    if not sample or rate <= 0:
        return EngineDemand(0.0, 0.0)
    tpot = longest_step_s(objectives)
    prefill = rate * sum(engine.prefill_s(each.prompt_tokens) for each in sample) / len(sample)
    output = sum(each.output_tokens for each in sample)
    context = sum((each.prompt_tokens + each.output_tokens / 2) * each.output_tokens for each in sample)
    context /= max(1, output)
    tokens = output / len(sample)
    return EngineDemand(prefill, rate * tokens * tpot / engine.decodes(context, tpot))


def best_split(engines: int, demand: EngineDemand) -> FleetPlan:
    """Return the split of ``engines`` engines whose busier role is least busy; it is near the demand's proportion."""
    return min(
        (FleetPlan(prefill, engines - prefill) for prefill in range(1, engines)),
        key=lambda plan: (demand.share(plan), abs(plan.prefill - plan.decode)),
    )


def candidates(now: FleetPlan, demand: EngineDemand, limits: PlanLimits, grow: bool) -> list[FleetPlan]:
    """Return plans other than ``now``, in the order in which to try them.

    With ``grow`` (``now`` misses the objectives): other splits of the same engines, then more engines, one more first.
    Without it: fewer engines, from the fewest that the estimate allows up to ``N - 1``.
    """
    if grow:
        totals = list(range(now.engines, limits.most + 1))
    else:
        least = max(limits.fewest, min(now.engines - 1, math.floor(demand.prefill + demand.decode)))
        totals = list(range(least, now.engines))
    found = list[FleetPlan]()
    for total in totals:
        middle = best_split(total, demand)
        near = [FleetPlan(middle.prefill + by, middle.decode - by) for by in (0, 1, -1)]
        found += [plan for plan in near if limits.allow(plan) and plan != now]
    return found


def of_few_sizes(plans: list[FleetPlan]) -> list[FleetPlan]:
    """Return the first two plans each of the smallest, the middle and the largest size; ``plans`` are in order of size.

    So plans of N - 1 engines are always among them.
    """
    totals = sorted({each.engines for each in plans})
    if not totals:
        return []
    kept = {totals[0], totals[len(totals) // 2], totals[-1]}
    return [each for index, each in enumerate(plans) if each.engines in kept and _place(plans, index) < 2]


def _place(plans: list[FleetPlan], index: int) -> int:
    """Return how many plans before ``index`` have the same size."""
    return sum(each.engines == plans[index].engines for each in plans[:index])
