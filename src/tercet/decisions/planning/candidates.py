"""What engines bear, by an estimate: the demand of the traffic, the fleets worth a simulation, and overload.

The candidates are few, and the promising ones first. Overload is found in the first seconds: prompts come faster than
prefill engines compute them, beyond chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tercet.decisions.planning.observed import (
    FEWEST_ENDED,
    FleetPlan,
    Observed,
    ObservedRequest,
    PlanLimits,
    answers_completed,
)
from tercet.decisions.roles import BUSY_FULL, Demand, prefill_pressure
from tercet.settings.fleet_settings import Objectives

STEP_SHARE = 0.9
"""Share of the TPOT objective that a step of decodes may take, in the estimate."""
MOST_DECODES = 4096
"""Largest number of sequences for which a step is predicted: the fit knows little about such a batch."""
BEYOND_CHANCE = 3.0
"""Standard deviations by which the work of the arrivals must exceed the capacity of the engines."""
RELIEF = 0.8
"""Largest load of the busier role after a change, as a share of that before: a smaller gain is not worth a change."""


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
    return [
        each
        for index, each in enumerate(plans)
        if each.engines in kept and sum(before.engines == each.engines for before in plans[:index]) < 2
    ]


class LearnedCapacity:
    """The capacity of one engine; implements :class:`~tercet.decisions.planning.candidates.EngineCapacity`.

    ``prefill_s`` returns the predicted seconds of a prompt of this number of tokens, and ``step_s`` those of a step of
    this number of sequences with this number of tokens of KV in total, which must not be less for more of either.
    ``kv_tokens`` is the size of the KV cache in tokens, 0 if unknown.
    """

    def __init__(
        self, prefill_s: Callable[[int], float], step_s: Callable[[float, float], float], kv_tokens: int = 0
    ) -> None:
        self._prefill_s, self._step_s, self._kv_tokens = prefill_s, step_s, kv_tokens

    def prefill_s(self, tokens: int) -> float:
        """Return the predicted seconds of a prompt of ``tokens`` tokens alone."""
        return self._prefill_s(tokens)

    def decodes(self, context: float, tpot: float) -> int:
        """Return the most sequences with ``context`` tokens of KV whose step takes at most ``tpot`` s; at least 1."""
        room = int(self._kv_tokens / max(1.0, context)) if self._kv_tokens else MOST_DECODES
        return most_decodes(lambda number: self._step_s(number, number * context), tpot, min(room, MOST_DECODES))


def overload_split(observed: Observed, measured: Demand, engine: EngineCapacity, seen: float = 1.0) -> FleetPlan | None:
    """Return the split of the same engines that bears the load, if prefills overload the present split; else None.

    Prefills overload it if their line, with its growth, breaks the objective for TTFT (as for roles), and if their
    demand exceeds the engines by :data:`BEYOND_CHANCE` standard deviations of Poisson arrivals. The demand is the
    ``measured`` one, in which cached prompts cost little, but at most the cost of the arrivals of the same seconds by
    ``engine``: times of the first requests mislead. Such evidence need not last: one second of arrivals is enough at
    45 requests/s on one engine that computes 15/s. ``observed`` has the share ``seen`` of all arrivals, and the others
    are expected to be like them. The demand of decodes follows from the arrivals by Little's law
    (:func:`~tercet.decisions.planning.candidates.demand_of`), since requests that wait in line do not decode yet;
    their present demand is its lower bound. Some answers must have ended, since before that the demand of the others
    is not known.
    """
    plan, ttft = observed.plan, observed.objectives.ttft
    able = sum(each.able and each.role == "prefill" for each in observed.engines)
    came = [each for each in observed.arrivals if observed.now - each.at <= measured.over_s]
    if ttft is None or observed.starting or able != plan.prefill or sum(each.ended for each in came) < FEWEST_ENDED:
        return None
    if prefill_pressure(measured, able, ttft) < 1:
        return None
    rate = len(came) / max(observed.now - came[0].at, 1e-3) / seen
    by_arrivals = demand_of(answers_completed(came), rate, engine, observed.objectives)
    prefill, chance = min(by_arrivals.prefill, measured.prefill), _chance(came)
    if prefill * (1 - BEYOND_CHANCE * chance) < able:
        return None
    # One standard deviation more: to give too few engines to the overloaded role would be the worse error.
    demand = EngineDemand(prefill * (1 + chance), max(by_arrivals.decode, _decoding(measured, engine, observed)))
    best = _bearing(plan.engines, demand)
    if best is None or best.prefill <= plan.prefill or demand.share(best) > RELIEF * demand.share(plan):
        return None
    return best


def _chance(came: Sequence[ObservedRequest]) -> float:
    """Return the standard deviation of the work of these prompts, as a share of that work, for Poisson arrivals."""
    work = sum(each.prompt_tokens for each in came)
    return math.sqrt(sum(each.prompt_tokens**2 for each in came)) / max(1, work)


def _bearing(engines: int, demand: EngineDemand) -> FleetPlan | None:
    """Return the split whose busier role is least busy, of those with enough engines to decode; None without one."""
    plans = [FleetPlan(engines - decode, decode) for decode in range(1, engines)]
    able = [each for each in plans if demand.decode <= BUSY_FULL * each.decode]
    return min(able, key=demand.share, default=None)


def _decoding(measured: Demand, engine: EngineCapacity, observed: Observed) -> float:
    """Return the number of engines that the present decodes keep busy, with fractions."""
    if measured.decodes <= 0:
        return 0.0
    context = measured.contexts / measured.decodes
    return measured.decodes / engine.decodes(context, longest_step_s(observed.objectives))
