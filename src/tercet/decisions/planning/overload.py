"""Detection of overload in the first seconds: prompts come faster than prefill engines compute them, beyond chance."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tercet.decisions.planning.arrivals import FEWEST_ENDED, ObservedRequest, answers_completed
from tercet.decisions.planning.candidates import EngineCapacity, EngineDemand, demand_of, longest_step_s
from tercet.decisions.planning.observed import FleetPlan, Observed
from tercet.decisions.roles.observed import Demand
from tercet.decisions.roles.pressures import BUSY_FULL, prefill_pressure

BEYOND_CHANCE = 3.0
"""Standard deviations by which the work of the arrivals must exceed the capacity of the engines."""
RELIEF = 0.8
"""Largest load of the busier role after a change, as a share of that before: a smaller gain is not worth a change."""


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
