"""The planner: it decides the number of engines and their roles by a simulation of each choice.

It remembers expected and measured results of its plans, and loads at which a search found nothing. Between two plans
its guard acts when queues grow: the controller of ``--roles auto`` changes roles, and adds engines if that does not
help. If all fleets miss the objectives, the one of the greatest worth is chosen, less the price of its engines.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tercet.decisions.planning import (
    RELIEF,
    EngineCapacity,
    EngineDemand,
    Expected,
    FleetPlan,
    Observed,
    ObservedEngine,
    PlanLimits,
    WantedPlan,
    answers_completed,
    best_split,
    demand_of,
)
from tercet.decisions.roles import BUSY_FULL, LastFlip, RoleController, idlest
from tercet.protocol import Role, TercetError
from tercet_planner.forecast import BIN_S, Forecast, Forecaster, Forecasting, is_enough


@dataclass(frozen=True)
class FleetChange:
    """A change of a fleet: engines with their new roles, roles of engines to start, and engines to drain and stop."""

    flips: tuple[tuple[str, Role], ...] = ()
    starts: tuple[Role, ...] = ()
    stops: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.flips or self.starts or self.stops)


def change_to(plan: FleetPlan, engines: Sequence[ObservedEngine]) -> FleetChange:
    """Return the smallest change that turns ``engines``, all that serve or start, into ``plan``.

    The engines with the least work left change first. A role with too many engines gives them to the other role before
    any engine is started or stopped.
    """
    idle: dict[Role, list[str]] = {
        role: list(idlest([each for each in engines if each.role == role], len(engines)))
        for role in ("prefill", "decode")
    }
    spare = {"prefill": len(idle["prefill"]) - plan.prefill, "decode": len(idle["decode"]) - plan.decode}
    flips = list[tuple[str, Role]]()
    pairs: tuple[tuple[Role, Role], ...] = (("prefill", "decode"), ("decode", "prefill"))
    for giving, taking in pairs:
        while spare[giving] > 0 and spare[taking] < 0:
            flips.append((idle[giving].pop(0), taking))
            spare[giving] -= 1
            spare[taking] += 1
    starts: list[Role] = [role for role, _ in pairs for _ in range(max(0, -spare[role]))]
    stops = [name for role, _ in pairs for name in idle[role][: max(0, spare[role])]]
    return FleetChange(tuple(flips), tuple(starts), tuple(stops))


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


SAME_LOAD = 0.95
"""A search that found nothing is not repeated at loads above this share of the load at which it was made."""
LIKE_LOAD = 0.9
"""Two loads are alike if the smaller one is at least this share of the larger: a few hundred requests tell no more."""
SEARCH_REPEAT_S = 120.0
"""Seconds after which a search that found nothing is repeated."""


@dataclass(frozen=True)
class Verdict:
    """A plan made ``at`` a time in seconds, with its reason and its results over the interval that follows.

    ``expected`` is what the simulation expects, ``came`` the measured share of the requests within the objectives;
    both are None while they are not known.
    """

    at: float
    plan: FleetPlan
    reason: str
    expected: Expected | None
    came: float | None = None


@dataclass(frozen=True)
class TriedLoad:
    """A load, in requests per second, at which a recent search for a fleet other than ``plan`` found nothing."""

    at: float = -math.inf
    rate: float = 0.0
    plan: FleetPlan | None = None

    def holds(self, now: float, rate: float) -> bool:
        """True if the search is recent and ``rate`` is like that load, or larger."""
        return now - self.at < SEARCH_REPEAT_S and rate >= SAME_LOAD * self.rate

    def settles(self, now: float, rate: float, plan: FleetPlan) -> bool:
        """True if the search is recent, ``plan`` is still the plan, and ``rate`` is like that load, and not larger."""
        alike = min(rate, self.rate) >= LIKE_LOAD * max(rate, self.rate)
        return plan == self.plan and now - self.at < SEARCH_REPEAT_S and alike


MARGIN = 0.1
"""Load beyond the forecast, as a share of it, at which a chosen fleet must still meet the objectives."""
MOST_MARGIN = 0.5
MARGIN_SIGMAS = 3.0
"""Standard deviations of a steady load that a fleet must bear in addition: for n requests, one is the root of n."""
SCALE_IN_MARGIN = 2.0
"""Factor of the margin for a fleet with fewer engines: the way back costs the start of an engine."""
REST_S = 15.0
"""Seconds after a change without another one: its effect must be measured first."""
SCALE_IN_REST_S = 30.0
"""Seconds after a change in which no engine is given up."""
SCALE_IN_WINDOW_S = 120.0
"""Length in seconds of the past whose largest load fewer engines must bear. It doubles when engines that were given up
are needed again soon, and returns to this value after an hour."""
MOST_SCALE_IN_WINDOW_S = 1800.0
SEEN_S = 180.0
"""Seconds of load that must have been seen before a fleet that meets the objectives gives up an engine."""
OVERLOAD_SEEN_S = 60.0
"""Seconds of load that must have been seen before that if every fleet misses the objectives: it was not a lull."""
SCALE_IN_REGRET = 4.0
"""A scale-in was wrong if the engine was needed again within this number of engine start times."""
SCALE_IN_CONFIRMATIONS = 2
"""Plans in a row that must find that fewer engines are enough."""
LEAST_GAIN = 0.02
"""Least gain of a change, as a share of the requests, if no fleet within the limits meets the objectives."""
GAIN_SIGMAS = 1.0
"""Standard deviations by which a fleet must be worth more than another one, simulated with equal requests."""
MISS_SIGMAS = 2.0
"""Standard deviations by which the present fleet must miss the objectives."""
LOAD_SIGMAS = 1.75
"""Standard deviations of a steady load: the present fleet must miss the objectives at that much less load, too. Fleets
that all miss them are compared at that much more load."""
REVERSAL_S = 120.0
"""Seconds in which roles that a plan changed are changed back only for a fleet that meets the objectives."""
GUARD_REVERSAL_S = 60.0
"""Seconds after a change of roles in which the guard does not change them back."""
OVERLOADED_S = 40.0
"""Seconds after a plan found that no fleet meets the objectives, in which the guard does nothing."""
MOST_SIMULATIONS = 6
"""Simulations of one search in addition to that of the present fleet."""
MOST_CLIMB_SIMULATIONS = 8
"""Simulations after which a search for the fleet that is worth most stops."""
VERDICTS_KEPT = 240
"""Verdicts that are kept: one hour of plans at 15 s each."""

Evaluate = Callable[[FleetPlan, Forecast], Expected]
"""A function from fleet and load to the expected result; raises :class:`~tercet.protocol.TercetError` if it fails."""


class Planner:
    """A policy with a memory: call :meth:`plan` at long intervals, and :meth:`guard` at short ones in between.

    ``evaluate`` simulates a fleet, ``engine`` is the capacity of one engine. ``ahead_s`` is the start time of an engine
    in seconds: a forecast must reach beyond it. ``margin`` is the smallest margin, as a share of the load.
    """

    def __init__(
        self,
        evaluate: Evaluate,
        engine: EngineCapacity,
        ahead_s: float = 30.0,
        margin: float = MARGIN,
        forecaster: Forecasting | None = None,
    ) -> None:
        self._evaluate = evaluate
        self._engine = engine
        self._ahead_s = ahead_s
        self._least_margin = margin
        self.margin = margin
        """Margin of load now: it grows while attainment is lower than expected, and shrinks back."""
        self.forecaster: Forecasting = forecaster or Forecaster()
        self._controller: RoleController | None = None
        self._plan: FleetPlan | None = None
        self._changed_at = -math.inf
        self._fewer = list[FleetPlan]()
        self._too_few = self._unreachable = self._settled = TriedLoad()
        self._overloaded_at = -math.inf
        self._loads: deque[tuple[float, float]] = deque()
        self._scale_in_window_s = SCALE_IN_WINDOW_S
        self._seen_from: float | None = None
        self._scaled_in_at = -math.inf
        self._flipped = self._planned_flip = LastFlip()
        self.verdicts: deque[Verdict] = deque(maxlen=VERDICTS_KEPT)
        """The last verdicts, the newest last."""
        self.simulations = 0
        self.forecast: Forecast | None = None
        """Forecast of the last plan; None if it had too little traffic for one."""

    def guard(self, observed: Observed) -> WantedPlan | None:
        """Return the fleet to change to at once, since queues grow unexpectedly; None to change nothing."""
        self._note(observed)
        if self._controller is None:
            self._controller = RoleController(observed.objectives, self._engine)
        # Engines that start do not count yet: their step times mislead until they have served for a moment.
        serving = tuple(each for each in observed.engines if each.able)
        effects = self._controller.on_tick(replace(observed, engines=serving))
        # Queues of a few long prompts come and go, so only plans change roles back soon. If no fleet meets the
        # objectives, queues are always there, and only plans decide what a change is worth.
        if effects.plan is None or observed.now - self._overloaded_at < OVERLOADED_S:
            return None
        if self._flipped.is_undone_by(observed.now, observed.plan, effects.plan, GUARD_REVERSAL_S):
            return None
        wanted = WantedPlan(effects.plan, f"guard: {effects.why}")
        self._changes_to(observed.now, wanted)
        return wanted

    def plan(self, observed: Observed) -> WantedPlan:
        """Return the wanted fleet from now on: the present one, with the reason, unless another one is better."""
        return self.adopt(observed, self.decide(observed))

    def decide(self, observed: Observed) -> WantedPlan:
        """Return the result of :meth:`plan` without adopting it; it may take long, and run in a thread.

        If :meth:`guard` changes the fleet meanwhile, the result is void; else call :meth:`adopt` with it.
        """
        self._note(observed)
        self._compare(observed)
        return self._wanted(observed)

    def adopt(self, observed: Observed, wanted: WantedPlan) -> WantedPlan:
        """Take ``wanted``, the result of :meth:`decide`, as the plan from now on, and return it."""
        if wanted.plan != observed.plan:
            self._changes_to(observed.now, wanted)
            self._planned_flip = self._planned_flip.then(observed.now, observed.plan, wanted.plan)
        else:
            self.verdicts.append(Verdict(observed.now, wanted.plan, wanted.reason, wanted.expected))
        return wanted

    def pause_s(self, interval_s: float) -> float:
        """Return the seconds until the next plan: ``interval_s``, or at most :data:`BIN_S` without a forecast."""
        return interval_s if self.forecast is not None else min(interval_s, BIN_S)

    # ---- results of changes ----------------------------------------------------------------------------------

    def _note(self, observed: Observed) -> None:
        """Record the present fleet: after a change that others made, the planner rests as well."""
        if self._plan is not None and observed.plan != self._plan:
            self._changed_at = observed.now
        self._plan = observed.plan

    def _changes_to(self, now: float, wanted: WantedPlan) -> None:
        before = self._plan
        self._plan, self._changed_at = wanted.plan, now
        self._fewer.clear()
        if before is not None:
            self._flipped = self._flipped.then(now, before, wanted.plan)
        if before is not None and wanted.plan.engines < before.engines:
            self._scaled_in_at = now
        elif before is not None and wanted.plan.engines > before.engines:
            self._scale_in_window_s = self._next_window_s(now)
        self.verdicts.append(Verdict(now, wanted.plan, wanted.reason, wanted.expected))

    def _next_window_s(self, now: float) -> float:
        """Return the seconds to look back from now on, when engines are needed: more if a scale-in was wrong.

        It was if the engine was needed again within :data:`SCALE_IN_REGRET` start times, or within half of the seconds
        to look back. A load that rises again later, as it does each day, does not lengthen them.
        """
        if now - self._scaled_in_at < max(SCALE_IN_REGRET * self._ahead_s, self._scale_in_window_s / 2):
            return min(MOST_SCALE_IN_WINDOW_S, 2 * self._scale_in_window_s)
        return SCALE_IN_WINDOW_S if now - self._scaled_in_at > 3600 else self._scale_in_window_s

    def _largest_load(self, now: float, rate: float) -> float:
        """Record ``rate``, and return the largest load of the seconds to look back, in requests per second."""
        if self._seen_from is None:
            self._seen_from = now
        self._loads.append((now, rate))
        while now - self._loads[0][0] > self._scale_in_window_s:
            self._loads.popleft()
        return max(load for _, load in self._loads)

    def _compare(self, observed: Observed) -> None:
        """Complete the last verdict, and raise the margin if the load was served worse than expected."""
        if not self.verdicts or observed.came is None:
            return
        last = self.verdicts[-1]
        if last.came is not None or last.plan != observed.plan:
            return
        self.verdicts[-1] = Verdict(last.at, last.plan, last.reason, last.expected, observed.came)
        if last.expected is None or observed.now - self._changed_at < REST_S:
            return
        share = observed.objectives.share
        if observed.came < share <= last.expected.attainment:
            self.margin = min(MOST_MARGIN, self.margin + 0.05)
        else:
            self.margin = max(self._least_margin, self.margin * 0.98)

    # ---- decisions -------------------------------------------------------------------------------------------

    def _wanted(self, observed: Observed) -> WantedPlan:
        now, plan = observed.now, observed.plan
        completed = answers_completed(observed.arrivals, seed=round(now))
        forecast = self.forecaster.look(now, observed.since, completed, self._ahead_s)
        self.forecast = forecast = forecast if is_enough(now, observed.since, observed.arrivals) else None
        if forecast is None:
            return WantedPlan(plan, "too little traffic was seen for a forecast")
        largest = self._largest_load(now, forecast.rate)
        if not forecast.rate:  # the fewest engines allowed, in the present proportion of roles
            fewest = observed.limits.fewest
            if plan.engines <= fewest or observed.starting:
                return WantedPlan(plan, "no traffic")
            prefill = min(max(1, round(fewest * plan.prefill / plan.engines)), fewest - 1)
            return WantedPlan(FleetPlan(prefill, fewest - prefill), "no traffic: the fewest engines allowed")
        if now - self._changed_at < REST_S:
            return WantedPlan(plan, f"the fleet changed {now - self._changed_at:.0f} s ago, and stays for {REST_S:g} s")
        try:
            expected = self._simulated(plan, forecast)
            if not observed.limits.allow(plan) or self._misses(observed, forecast, expected):
                return self._better(observed, forecast, expected)
            relieved = self._relieved(observed, forecast, expected)
            return relieved or self._cheaper(observed, replace(forecast, rate=largest), expected)
        except TercetError as error:
            return WantedPlan(plan, f"the simulation failed: {error}; the fleet stays")

    def _misses(self, observed: Observed, forecast: Forecast, expected: Expected) -> bool:
        """True if the present fleet misses the objectives, and not only in a minute that is busier by chance."""
        share = observed.objectives.share
        if expected.attainment >= share - MISS_SIGMAS * expected.chance:
            return False
        by_chance = LOAD_SIGMAS / math.sqrt(len(forecast.sample))
        calmer = self._simulated(observed.plan, replace(forecast, rate=forecast.rate * (1 - by_chance)))
        return calmer.attainment < share - MISS_SIGMAS * calmer.chance

    def _relieved(self, observed: Observed, forecast: Forecast, expected: Expected) -> WantedPlan | None:
        """Return another split, which costs nothing, if it bears the margin and the present busy split does not."""
        plan, share = observed.plan, observed.objectives.share
        demand = demand_of(forecast.sample, forecast.rate, self._engine, observed.objectives)
        split = best_split(plan.engines, demand)
        if demand.share(plan) < BUSY_FULL or demand.share(split) > RELIEF * demand.share(plan):
            return None
        busier = self._with_margin(forecast, 1.0)
        if self._flipped.is_undone_by(observed.now, plan, split, REVERSAL_S):
            return None
        strained = self._simulated(plan, busier)
        if strained.attainment >= share - MISS_SIGMAS * strained.chance:
            return None
        got = self._simulated(split, busier)
        if got.attainment < share:
            return None
        reason = f"{plan} meets the objectives for {expected.attainment:.1%} at {forecast.why}, with a margin for "
        return WantedPlan(split, f"{reason}{strained.attainment:.1%}; {split} for {got.attainment:.1%}", got)

    def _better(self, observed: Observed, forecast: Forecast, expected: Expected) -> WantedPlan:
        """Return the cheapest fleet that meets the objectives; if no fleet does, the one that is worth most."""
        plan, share = observed.plan, observed.objectives.share
        said = f"{plan} would meet them for {expected.attainment:.1%} at {forecast.why}"
        demand = demand_of(forecast.sample, forecast.rate, self._engine, observed.objectives)
        found = [] if self._unreachable.holds(observed.now, forecast.rate) else self._grown(observed, forecast, demand)
        meeting = [(each, got) for each, got in found if got.attainment >= share]
        if meeting:
            best, got = min(meeting, key=lambda each: (each[0].engines, -each[1].attainment))
            return WantedPlan(best, f"{said}; {best} for {got.attainment:.1%} with a margin of {self.margin:.0%}", got,
                              tuple(found))  # fmt: skip
        if found:
            self._unreachable = TriedLoad(observed.now, forecast.rate)
        self._overloaded_at = observed.now
        return self._worth_most(observed, forecast, demand, expected, said)

    def _grown(self, observed: Observed, forecast: Forecast, demand: EngineDemand) -> list[Simulated]:
        """Simulate other splits and more engines with the margin, until some meet the objectives."""
        share, found = observed.objectives.share, list[Simulated]()
        tries = candidates(observed.plan, demand, observed.limits, grow=True)
        for index, each in enumerate(tries[: 3 * MOST_SIMULATIONS]):
            cheaper_meets = any(got.attainment >= share and tried.engines < each.engines for tried, got in found)
            if cheaper_meets or len(found) >= MOST_SIMULATIONS:
                break
            # A fleet that is too small even by the estimate is not simulated, unless it is the last one.
            if demand.share(each) > 1.3 and index + 1 < len(tries) and any(demand.share(t) <= 1.3 for t in tries):
                continue
            found.append((each, self._simulated(each, self._with_margin(forecast, 1.0))))
        return found

    def _worth_most(
        self, observed: Observed, forecast: Forecast, demand: EngineDemand, expected: Expected, said: str
    ) -> WantedPlan:
        """Return the fleet that is worth most, when no fleet within the limits meets the objectives.

        All are simulated at a load that is higher by chance: a fleet at its limit serves well for a minute.
        """
        plan, now = observed.plan, observed.now
        if self._settled.settles(now, forecast.rate, plan):
            return WantedPlan(
                plan, f"{said}; no simulated fleet meets them at this load, and none was worth more", expected
            )
        found = self._climbed(observed, forecast, demand)
        values = worths(found)
        value, (best, got) = max(zip(values, found, strict=True), key=lambda each: each[0])
        needed = max(LEAST_GAIN, GAIN_SIGMAS * max(expected.chance, got.chance))
        if value < values[0] + needed or self._planned_flip.is_undone_by(now, plan, best, REVERSAL_S):
            self._fewer.clear()
            self._settled = TriedLoad(now, forecast.rate, plan)
            reason = f"{said}; no simulated fleet meets them, and none is worth {needed:.0%} more"
            return WantedPlan(plan, reason, expected, tuple(found[1:]))
        reason = f"{said}; no simulated fleet meets them, and {best} is worth more, with {got.attainment:.1%}"
        if best.engines >= plan.engines:
            return WantedPlan(best, reason, got, tuple(found[1:]))
        if observed.starting or now - self._changed_at < SCALE_IN_REST_S or not self._has_seen(now, OVERLOAD_SEEN_S):
            return WantedPlan(plan, f"{reason}; engines are not given up yet", expected, tuple(found[1:]))
        return self._confirmed(plan, reason, best, got, found[1:])

    def _climbed(self, observed: Observed, forecast: Forecast, demand: EngineDemand) -> list[Simulated]:
        """Simulate the present fleet, its neighbours, and those of the best one, until no fleet is worth more."""
        busier = replace(forecast, rate=forecast.rate * (1 + LOAD_SIGMAS / math.sqrt(len(forecast.sample))))
        found = [(observed.plan, self._simulated(observed.plan, busier))]
        tries = worth_simulating(observed.plan, demand, observed.limits)
        while tries and len(found) <= MOST_CLIMB_SIMULATIONS:
            found += [(each, self._simulated(each, busier)) for each in tries]
            values = worths(found)
            best, _ = found[values.index(max(values))]
            known = {each for each, _ in found}
            tries = [each for each in neighbours(best, observed.limits) if each not in known]
        return found

    def _cheaper(self, observed: Observed, forecast: Forecast, expected: Expected) -> WantedPlan:
        """Return a smaller fleet, if it met the objectives with a larger margin at several looks in a row."""
        plan, share = observed.plan, observed.objectives.share
        fine = f"{plan} meets the objectives for {expected.attainment:.1%} at {forecast.why}"
        if plan.engines <= observed.limits.fewest:
            return WantedPlan(plan, f"{fine}; fewer engines are not allowed", expected)
        if observed.starting or observed.now - self._changed_at < SCALE_IN_REST_S:
            return WantedPlan(plan, f"{fine}; engines start, or the fleet has just changed", expected)
        if not self._has_seen(observed.now, SEEN_S):
            return WantedPlan(plan, f"{fine}; no engine is given up before {SEEN_S:.0f} s of load were seen", expected)
        if self._too_few.plan == plan and self._too_few.holds(observed.now, forecast.rate):
            return WantedPlan(plan, f"{fine}; fewer engines were not enough at this load", expected)
        demand = demand_of(forecast.sample, forecast.rate, self._engine, observed.objectives)
        found = list[tuple[FleetPlan, Expected]]()
        for each in of_few_sizes(candidates(plan, demand, observed.limits, grow=False))[:MOST_SIMULATIONS]:
            got = self._simulated(each, self._with_margin(forecast, SCALE_IN_MARGIN))
            found.append((each, got))
            if got.attainment >= share:
                margin = SCALE_IN_MARGIN * self.margin
                reason = f"{fine}; {each} is enough with a margin of {margin:.0%}"
                return self._confirmed(plan, reason, each, got, found)
        self._fewer.clear()
        self._too_few = TriedLoad(observed.now, forecast.rate, plan)
        return WantedPlan(plan, f"{fine}; fewer engines would not, with a margin", expected, tuple(found))

    def _confirmed(
        self, plan: FleetPlan, reason: str, fewer: FleetPlan, got: Expected, found: list[Simulated]
    ) -> WantedPlan:
        """Return the largest of the fleets that several looks in a row found; until then, the present ``plan``."""
        self._fewer.append(fewer)
        looks = len(self._fewer)
        if looks < SCALE_IN_CONFIRMATIONS:
            return WantedPlan(plan, f"{reason}; look {looks} of {SCALE_IN_CONFIRMATIONS}", got, tuple(found))
        chosen = max(self._fewer, key=lambda each: each.engines)
        self._fewer.clear()
        return WantedPlan(chosen, f"{reason}; {chosen} by {looks} looks", got, tuple(found))

    def _has_seen(self, now: float, seconds: float) -> bool:
        return self._seen_from is not None and now - self._seen_from >= seconds

    def _with_margin(self, forecast: Forecast, times: float) -> Forecast:
        """Return the forecast with more load: ``times`` the margin or the deviation by chance, whichever is larger."""
        margin = max(self.margin, MARGIN_SIGMAS / math.sqrt(len(forecast.sample)))
        return replace(forecast, rate=forecast.rate * (1 + times * margin))

    def _simulated(self, plan: FleetPlan, forecast: Forecast) -> Expected:
        self.simulations += 1
        return self._evaluate(plan, forecast)
