"""Which fleets are worth a simulation: few, and the promising ones first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tercet.decisions.planning.arrivals import ObservedRequest
from tercet.decisions.planning.observed import FleetPlan, PlanLimits
from tercet.settings.role_settings import Objectives

STEP_SHARE = 0.9
"""Share of the TPOT objective that a step of decodes may take in the estimate."""


class EngineCapacity(Protocol):
    """What one engine can do, as far as an estimate needs it."""

    def prefill_s(self, tokens: int) -> float:
        """Seconds in which it computes a prompt of so many tokens alone."""
        ...

    def decodes(self, context: float, tpot: float) -> int:
        """How many sequences of so many tokens of KV it decodes at ``tpot`` seconds a step; at least 1."""
        ...


@dataclass(frozen=True)
class EngineDemand:
    """Engines that a load keeps busy, by role; fractions count."""

    prefill: float
    decode: float

    def share(self, plan: FleetPlan) -> float:
        """Load of the busier role of a plan; 1 is all that it can do."""
        return max(self.prefill / plan.prefill, self.decode / plan.decode)


def demand_of(
    sample: Sequence[ObservedRequest], rate: float, engine: EngineCapacity, objectives: Objectives
) -> EngineDemand:
    """The estimate for requests like ``sample`` at ``rate`` per second.

    Prefill: the prompts' seconds per second. Decode: by Little's law as many sequences run as arrive in the time that
    one takes at the objective's TPOT; an engine holds as many as its steps and its KV allow.
    """
    if not sample or rate <= 0:
        return EngineDemand(0.0, 0.0)
    tpot = STEP_SHARE * (objectives.tpot or 0.05)
    prefill = rate * sum(engine.prefill_s(each.prompt_tokens) for each in sample) / len(sample)
    output = sum(each.output_tokens for each in sample)
    context = sum((each.prompt_tokens + each.output_tokens / 2) * each.output_tokens for each in sample)
    context /= max(1, output)
    tokens = output / len(sample)
    return EngineDemand(prefill, rate * tokens * tpot / engine.decodes(context, tpot))


def best_split(engines: int, demand: EngineDemand) -> FleetPlan:
    """The split of so many engines whose busier role is least busy; near the demand's proportion."""
    return min(
        (FleetPlan(prefill, engines - prefill) for prefill in range(1, engines)),
        key=lambda plan: (demand.share(plan), abs(plan.prefill - plan.decode)),
    )


def candidates(now: FleetPlan, demand: EngineDemand, limits: PlanLimits, grow: bool) -> list[FleetPlan]:
    """Plans other than ``now`` in the order in which they should be tried.

    With ``grow`` (the present one does not do): other splits of the same engines, then more engines, one more first.
    Without it: fewer engines, as few as the estimate allows first, ``N - 1`` last.
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
    """Of plans in order of their size, those of the smallest, the middle and the largest size: N - 1 is among them."""
    totals = sorted({each.engines for each in plans})
    if not totals:
        return []
    kept = {totals[0], totals[len(totals) // 2], totals[-1]}
    return [each for index, each in enumerate(plans) if each.engines in kept and _place(plans, index) < 2]


def _place(plans: list[FleetPlan], index: int) -> int:
    """Which of the plans of its size it is."""
    return sum(each.engines == plans[index].engines for each in plans[:index])
