"""Decides how many engines a fleet has and in which roles, by simulating what each choice would give."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from tercet.decisions.planning.arrivals import answers_completed
from tercet.decisions.planning.candidates import EngineCapacity, EngineDemand, candidates, demand_of
from tercet.decisions.planning.forecast import Forecast, Forecaster, Forecasting
from tercet.decisions.planning.guard import QueueGuard
from tercet.decisions.planning.observed import Expected, FleetPlan, Observed, WantedPlan
from tercet.decisions.planning.worth import Simulated, worth_simulating, worths
from tercet.protocol import TercetError

MARGIN = 0.1
"""Share of load beyond the forecast at which a fleet that is chosen must still meet the objectives."""
MOST_MARGIN = 0.5
CHANCE = 3.0
"""Standard deviations of a steady load that a fleet must bear: of n requests it is the root of n."""
SCALE_IN_MARGIN = 2.0
"""Factor of the margin for a fleet of fewer engines: the way back costs an engine's start."""
REST_S = 15.0
"""Seconds after a change without another one: what it did must be seen first."""
SCALE_IN_REST_S = 30.0
"""The same, before engines are given up."""
LOOKED_BACK_S = 180.0
"""Seconds of which the largest load must be borne by fewer engines; none is given up before that much was seen. Doubles
when engines that were given up are needed again within twice that time, and forgets it after an hour."""
MOST_LOOKED_BACK_S = 1800.0
LOOKS_FOR_SCALE_IN = 2
"""Looks in a row that must find fewer engines to be enough."""
GAIN = 0.02
"""What a change must gain if no fleet within the limits meets the objectives, and more than chance does."""
WORTH_BY_CHANCE = 1.0
"""Standard deviations that count as chance when two fleets are compared, which were simulated with equal requests."""
MISSED_BY_CHANCE = 2.0
"""Standard deviations by which the present fleet must miss the objectives."""
REVERSAL_S = 120.0
"""Seconds in which roles that were changed are changed back only for a fleet that meets the objectives."""
GUARD_REVERSAL_S = 60.0
"""Seconds in which the guard does not change roles back that were changed."""
PRICED_S = 40.0
"""Seconds after a plan found that no fleet meets the objectives, in which the guard adds no engines."""
MOST_SIMULATIONS = 6
"""Simulations of one search in addition to that of the present fleet."""
SAME_LOAD = 0.95
"""Share of a load at which something was tried in vain, above which it is not tried again."""
TRIED_AGAIN_S = 120.0
"""Seconds after which it is."""
REMEMBERED = 240
"""Verdicts that are kept: an hour of looks a quarter of a minute apart."""

Evaluate = Callable[[FleetPlan, Forecast], Expected]
"""What a fleet would give under a load; raises :class:`~tercet.protocol.TercetError` if it cannot say."""


@dataclass(frozen=True)
class Verdict:
    """What was expected ``at`` a time for the interval after it, and what came; None while, or if, it is not known."""

    at: float
    plan: FleetPlan
    reason: str
    expected: Expected | None
    came: float | None = None


@dataclass(frozen=True)
class _Tried:
    """A load at which something was tried in vain: what fewer than ``engines`` engines, or other fleets, would give."""

    at: float = -math.inf
    rate: float = 0.0
    engines: int = 0

    def holds(self, now: float, rate: float) -> bool:
        """Whether the load is still like that, or larger, and it was lately."""
        return now - self.at < TRIED_AGAIN_S and rate >= SAME_LOAD * self.rate


class Planner:
    """A policy with a memory: :meth:`plan` at long intervals, :meth:`guard` at short ones in between.

    ``evaluate`` simulates, ``engine`` says what one engine can do. ``ahead_s`` is how long a new engine takes to start:
    a forecast must reach beyond it.
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
        """Grows while attainment falls short of what was expected, and shrinks back."""
        self.forecaster: Forecasting = forecaster or Forecaster()
        self._guard: QueueGuard | None = None
        self._plan: FleetPlan | None = None
        self._changed_at = -math.inf
        self._fewer = list[FleetPlan]()
        self._too_few = self._unreachable = self._settled = _Tried()
        self._priced_at = -math.inf
        self._loads: deque[tuple[float, float]] = deque()
        self._looked_back_s = LOOKED_BACK_S
        self._seen_from: float | None = None
        self._given_up_at = -math.inf
        self._flipped = (-math.inf, 0)
        self.verdicts: deque[Verdict] = deque(maxlen=REMEMBERED)
        """The newest last."""
        self.simulations = 0

    def guard(self, observed: Observed) -> WantedPlan | None:
        """What must be done at once, because queues grow that no forecast saw coming; None if nothing."""
        self._note(observed)
        if self._guard is None:
            self._guard = QueueGuard(observed.objectives)
        found = self._guard.look(observed)
        if found is not None and (self._guard_reverses(observed, found) or self._not_worth_it(observed, found)):
            return None
        if found is not None:
            self._changes_to(observed.now, found)
        return found

    def plan(self, observed: Observed) -> WantedPlan:
        """What is wanted from now on: the present plan, with the reason, unless another one is better."""
        self._note(observed)
        self._compare(observed)
        wanted = self._wanted(observed)
        if wanted.plan != observed.plan:
            self._changes_to(observed.now, wanted)
        else:
            self.verdicts.append(Verdict(observed.now, wanted.plan, wanted.reason, wanted.expected))
        return wanted

    def _guard_reverses(self, observed: Observed, found: WantedPlan) -> bool:
        """Queues of a few long prompts come and go: only plans change roles back soon."""
        soon = observed.now - self._flipped[0] < GUARD_REVERSAL_S
        return soon and self._reverses(observed.now, observed.plan, found.plan)

    def _not_worth_it(self, observed: Observed, found: WantedPlan) -> bool:
        """Where no fleet meets the objectives, there are always queues: plans alone say what is worth its engines."""
        return found.plan.engines > observed.plan.engines and observed.now - self._priced_at < PRICED_S

    # ---- what came of it -------------------------------------------------------------------------------------

    def _note(self, observed: Observed) -> None:
        """A change that others made is rested after as well."""
        if self._plan is not None and observed.plan != self._plan:
            self._changed_at = observed.now
        self._plan = observed.plan

    def _changes_to(self, now: float, wanted: WantedPlan) -> None:
        before = self._plan
        self._plan, self._changed_at = wanted.plan, now
        self._fewer.clear()
        if before is not None and _direction(before, wanted.plan):
            self._flipped = (now, _direction(before, wanted.plan))
        if before is not None and wanted.plan.engines < before.engines:
            self._given_up_at = now
        elif before is not None and wanted.plan.engines > before.engines:
            self._looked_back_s = self._patience(now)
        self.verdicts.append(Verdict(now, wanted.plan, wanted.reason, wanted.expected))

    def _patience(self, now: float) -> float:
        """For how long to look back from now on, when engines are needed: longer if some were given up lately."""
        if now - self._given_up_at < 2 * self._looked_back_s:
            return min(MOST_LOOKED_BACK_S, 2 * self._looked_back_s)
        return LOOKED_BACK_S if now - self._given_up_at > 3600 else self._looked_back_s

    def _largest_load(self, now: float, rate: float) -> float:
        """The largest one lately, this one included."""
        if self._seen_from is None:
            self._seen_from = now
        self._loads.append((now, rate))
        while now - self._loads[0][0] > self._looked_back_s:
            self._loads.popleft()
        return max(load for _, load in self._loads)

    def _compare(self, observed: Observed) -> None:
        """Complete the last verdict; a load that was served worse than expected needs a larger margin."""
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
        if forecast is None:
            return WantedPlan(plan, "too little was seen for a forecast")
        largest = self._largest_load(now, forecast.rate)
        if not forecast.rate:
            return self._without_traffic(observed)
        if now - self._changed_at < REST_S:
            return WantedPlan(plan, f"the fleet changed {now - self._changed_at:.0f} s ago, and rests for {REST_S:g} s")
        try:
            expected = self._simulated(plan, forecast)
            missed = expected.attainment < observed.objectives.share - MISSED_BY_CHANCE * expected.chance
            if missed or not observed.limits.allow(plan):
                return self._better(observed, forecast, expected)
            return self._cheaper(observed, replace(forecast, rate=largest), expected)
        except TercetError as error:
            return WantedPlan(plan, f"no simulation: {error}; the fleet stays")

    def _without_traffic(self, observed: Observed) -> WantedPlan:
        """The fewest engines allowed, in the proportion of the present ones."""
        plan, fewest = observed.plan, observed.limits.fewest
        if plan.engines <= fewest or observed.starting:
            return WantedPlan(plan, "no traffic")
        prefill = min(max(1, round(fewest * plan.prefill / plan.engines)), fewest - 1)
        return WantedPlan(FleetPlan(prefill, fewest - prefill), "no traffic: the fewest engines allowed")

    def _better(self, observed: Observed, forecast: Forecast, expected: Expected) -> WantedPlan:
        """The cheapest fleet that meets the objectives; if none does, the one that is worth its engines."""
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
            self._unreachable = _Tried(observed.now, forecast.rate)
        self._priced_at = observed.now
        return self._worth_most(observed, forecast, demand, expected, said)

    def _grown(self, observed: Observed, forecast: Forecast, demand: EngineDemand) -> list[Simulated]:
        """Other splits and more engines, simulated with the margin until some meet the objectives."""
        share, found = observed.objectives.share, list[Simulated]()
        tries = candidates(observed.plan, demand, observed.limits, grow=True)
        for index, each in enumerate(tries[: 3 * MOST_SIMULATIONS]):
            cheaper_meets = any(got.attainment >= share and tried.engines < each.engines for tried, got in found)
            if cheaper_meets or len(found) >= MOST_SIMULATIONS:
                break
            # Where the estimate alone says that it cannot do, there is nothing to simulate, unless it is the last one.
            if demand.share(each) > 1.3 and index + 1 < len(tries) and any(demand.share(t) <= 1.3 for t in tries):
                continue
            found.append((each, self._simulated(each, self._with_margin(forecast, 1.0))))
        return found

    def _worth_most(
        self, observed: Observed, forecast: Forecast, demand: EngineDemand, expected: Expected, said: str
    ) -> WantedPlan:
        """No fleet within the limits meets the objectives: what is worth its engines at the expected load."""
        plan, now = observed.plan, observed.now
        if self._settled.holds(now, forecast.rate):
            return WantedPlan(plan, f"{said}; no fleet meets them at this load, and none was worth more", expected)
        others = worth_simulating(plan, demand, observed.limits, MOST_SIMULATIONS)
        found = [(plan, expected), *((each, self._simulated(each, forecast)) for each in others)]
        values = worths(found)
        value, (best, got) = max(zip(values, found, strict=True), key=lambda each: each[0])
        needed = max(GAIN, WORTH_BY_CHANCE * max(expected.chance, got.chance))
        if value < values[0] + needed or self._reverses(now, plan, best):
            self._fewer.clear()
            self._settled = _Tried(now, forecast.rate)
            return WantedPlan(plan, f"{said}; no fleet meets them, and none is worth {needed:.0%} more", expected,
                              tuple(found[1:]))  # fmt: skip
        reason = f"{said}; no fleet meets them, and {best} is worth more, with {got.attainment:.1%}"
        if best.engines >= plan.engines:
            return WantedPlan(best, reason, got, tuple(found[1:]))
        if observed.starting or now - self._changed_at < SCALE_IN_REST_S or not self._saw_enough(now):
            return WantedPlan(plan, f"{reason}; engines are not given up yet", expected, tuple(found[1:]))
        return self._confirmed(plan, reason, best, got, found[1:])

    def _cheaper(self, observed: Observed, forecast: Forecast, expected: Expected) -> WantedPlan:
        """Fewer engines, if they met the objectives with a larger margin at several looks in a row."""
        plan, share = observed.plan, observed.objectives.share
        fine = f"{plan} meets the objectives for {expected.attainment:.1%} at {forecast.why}"
        if plan.engines <= observed.limits.fewest:
            return WantedPlan(plan, f"{fine}; fewer engines are not allowed", expected)
        if observed.starting or observed.now - self._changed_at < SCALE_IN_REST_S:
            return WantedPlan(plan, f"{fine}; engines start, or the fleet has just changed", expected)
        if not self._saw_enough(observed.now):
            return WantedPlan(
                plan, f"{fine}; no engine is given up before {LOOKED_BACK_S:.0f} s of load were seen", expected
            )
        if self._too_few.engines == plan.engines and self._too_few.holds(observed.now, forecast.rate):
            return WantedPlan(plan, f"{fine}; fewer engines did not do at this load", expected)
        demand = demand_of(forecast.sample, forecast.rate, self._engine, observed.objectives)
        found = list[tuple[FleetPlan, Expected]]()
        for each in _few_totals(candidates(plan, demand, observed.limits, grow=False))[:MOST_SIMULATIONS]:
            got = self._simulated(each, self._with_margin(forecast, SCALE_IN_MARGIN))
            found.append((each, got))
            if got.attainment >= share:
                return self._confirmed(plan, fine, each, got, found)
        self._fewer.clear()
        self._too_few = _Tried(observed.now, forecast.rate, plan.engines)
        return WantedPlan(plan, f"{fine}; with fewer engines and a margin it would not", expected, tuple(found))

    def _confirmed(
        self, plan: FleetPlan, fine: str, fewer: FleetPlan, got: Expected, found: list[tuple[FleetPlan, Expected]]
    ) -> WantedPlan:
        """Act on the largest of the fleets that looks in a row found to be enough."""
        self._fewer.append(fewer)
        looks = len(self._fewer)
        if looks < LOOKS_FOR_SCALE_IN:
            return WantedPlan(plan, f"{fine}; {fewer} seems to be enough, look {looks} of {LOOKS_FOR_SCALE_IN}", got,
                          tuple(found))  # fmt: skip
        chosen = max(self._fewer, key=lambda each: each.engines)
        self._fewer.clear()
        margin = SCALE_IN_MARGIN * self.margin
        return WantedPlan(chosen, f"{fine}; {chosen} is enough with a margin of {margin:.0%}", got, tuple(found))

    def _saw_enough(self, now: float) -> bool:
        """Whether load was seen for as long as is looked back at before engines are given up."""
        return self._seen_from is not None and now - self._seen_from >= LOOKED_BACK_S

    def _reverses(self, now: float, plan: FleetPlan, wanted: FleetPlan) -> bool:
        """Whether roles would be changed back that were changed lately."""
        direction = _direction(plan, wanted)
        return direction != 0 and direction == -self._flipped[1] and now - self._flipped[0] < REVERSAL_S

    def _with_margin(self, forecast: Forecast, times: float) -> Forecast:
        """With more load: the margin, or the deviation that chance gives so many requests, the larger of the two."""
        margin = max(self.margin, CHANCE / math.sqrt(len(forecast.sample)))
        return replace(forecast, rate=forecast.rate * (1 + times * margin))

    def _simulated(self, plan: FleetPlan, forecast: Forecast) -> Expected:
        self.simulations += 1
        return self._evaluate(plan, forecast)


def _direction(before: FleetPlan, after: FleetPlan) -> int:
    """1 for engines that are to prefill, -1 for engines that are to decode, 0 where no role changes."""
    if after.prefill > before.prefill and after.decode < before.decode:
        return 1
    return -1 if after.prefill < before.prefill and after.decode > before.decode else 0


def _few_totals(plans: list[FleetPlan]) -> list[FleetPlan]:
    """Of plans in order of their size, those of the smallest, the middle and the largest size: N - 1 is among them."""
    totals = sorted({each.engines for each in plans})
    if not totals:
        return []
    kept = {totals[0], totals[len(totals) // 2], totals[-1]}
    return [each for index, each in enumerate(plans) if each.engines in kept and _place(plans, index) < 2]


def _place(plans: list[FleetPlan], index: int) -> int:
    """Which of the plans of its size it is."""
    return sum(each.engines == plans[index].engines for each in plans[:index])
