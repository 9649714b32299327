"""Decides how many engines a fleet has and in which roles, by simulating what each choice would give."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from tercet.decisions.planning.arrivals import answers_completed
from tercet.decisions.planning.candidates import (
    EngineCapacity,
    EngineDemand,
    best_split,
    candidates,
    demand_of,
    of_few_sizes,
)
from tercet.decisions.planning.forecast import BIN_S, Forecast, Forecaster, Forecasting, tells_enough
from tercet.decisions.planning.guard import QueueGuard
from tercet.decisions.planning.observed import Expected, FleetPlan, Observed, WantedPlan
from tercet.decisions.planning.overload import RELIEF
from tercet.decisions.planning.remembered import TriedLoad, Verdict
from tercet.decisions.planning.worth import Simulated, neighbours, worth_simulating, worths
from tercet.decisions.roles.pressures import BUSY_FULL
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
LOOKED_BACK_S = 120.0
"""Seconds of which the largest load must be borne by fewer engines. Doubles when engines that were given up are needed
again soon, and forgets that after an hour."""
SEEN_S = 180.0
"""Seconds of load that must have been seen before a fleet that meets the objectives gives any engine up,"""
PRICED_SEEN_S = 60.0
"""and one that misses them, as each fleet does: what was seen of that load is not its lull."""
REGRETTED_STARTS = 4.0
"""Times an engine's start that engines must have been away for, lest giving them up was in vain."""
MOST_LOOKED_BACK_S = 1800.0
LOOKS_FOR_SCALE_IN = 2
"""Looks in a row that must find fewer engines to be enough."""
GAIN = 0.02
"""What a change must gain if no fleet within the limits meets the objectives, and more than chance does."""
WORTH_BY_CHANCE = 1.0
"""Standard deviations that count as chance when two fleets are compared, which were simulated with equal requests."""
MISSED_BY_CHANCE = 2.0
"""Standard deviations by which the present fleet must miss the objectives."""
BUSY_BY_CHANCE = 1.5
"""Standard deviations of a steady load by which the present fleet must miss the objectives at less load, too."""
REVERSAL_S = 120.0
"""Seconds in which roles that a plan changed are changed back only for a fleet that meets the objectives."""
GUARD_REVERSAL_S = 60.0
"""Seconds in which the guard does not change roles back that were changed."""
PRICED_S = 40.0
"""Seconds after a plan found that no fleet meets the objectives, in which the guard does nothing."""
MOST_SIMULATIONS = 6
"""Simulations of one search in addition to that of the present fleet."""
MOST_CLIMBED = 8
"""Simulations after which a search for the fleet that is worth most goes no further."""
REMEMBERED = 240
"""Verdicts that are kept: an hour of looks a quarter of a minute apart."""

Evaluate = Callable[[FleetPlan, Forecast], Expected]
"""What a fleet would give under a load; raises :class:`~tercet.protocol.TercetError` if it cannot say."""


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
        self._too_few = self._unreachable = self._settled = TriedLoad()
        self._priced_at = -math.inf
        self._loads: deque[tuple[float, float]] = deque()
        self._looked_back_s = LOOKED_BACK_S
        self._seen_from: float | None = None
        self._given_up_at = -math.inf
        self._flipped = self._planned_flip = (-math.inf, 0)
        self.verdicts: deque[Verdict] = deque(maxlen=REMEMBERED)
        """The newest last."""
        self.simulations = 0
        self.forecast: Forecast | None = None
        """That of the last plan."""

    def guard(self, observed: Observed) -> WantedPlan | None:
        """What must be done at once, because queues grow that no forecast saw coming; None if nothing."""
        self._note(observed)
        if self._guard is None:
            self._guard = QueueGuard(observed.objectives, self._engine)
        found = self._guard.look(observed)
        if found is not None and self._overruled(observed, found):
            return None
        if found is not None:
            self._changes_to(observed.now, found)
        return found

    def plan(self, observed: Observed) -> WantedPlan:
        """What is wanted from now on: the present plan, with the reason, unless another one is better."""
        return self.adopt(observed, self.decide(observed))

    def decide(self, observed: Observed) -> WantedPlan:
        """What :meth:`plan` would answer. It may take long, and run in a thread while :meth:`guard` is asked.

        If the guard changes the fleet meanwhile, the answer is void; else :meth:`adopt` must follow.
        """
        self._note(observed)
        self._compare(observed)
        return self._wanted(observed)

    def adopt(self, observed: Observed, wanted: WantedPlan) -> WantedPlan:
        """Take what was decided as the plan from now on; returns it."""
        if wanted.plan != observed.plan:
            self._changes_to(observed.now, wanted)
            if _direction(observed.plan, wanted.plan):
                self._planned_flip = self._flipped
        else:
            self.verdicts.append(Verdict(observed.now, wanted.plan, wanted.reason, wanted.expected))
        return wanted

    def pause_s(self, interval_s: float) -> float:
        """Seconds until the next plan, of a regular ``interval_s``: fewer while nothing has been forecast."""
        return interval_s if self.forecast is not None else min(interval_s, BIN_S)

    def _overruled(self, observed: Observed, found: WantedPlan) -> bool:
        """Whether the guard is to wait for the next plan.

        Queues of a few long prompts come and go: only plans change roles back soon. Where no fleet meets the
        objectives, there are always queues, and plans alone say what is worth it.
        """
        if observed.now - self._priced_at < PRICED_S:
            return True
        return self._reverses(self._flipped, observed.now, observed.plan, found.plan, GUARD_REVERSAL_S)

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
        """For how long to look back from now on, when engines are needed: longer if some were given up in vain.

        That is, if they were away for less than a few of their starts, or for less than half of the time that is looked
        back. A load that rises again later, as each day, does not lengthen it.
        """
        if now - self._given_up_at < max(REGRETTED_STARTS * self._ahead_s, self._looked_back_s / 2):
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
        self.forecast = forecast = forecast if tells_enough(now, observed.since, observed.arrivals) else None
        if forecast is None:
            return WantedPlan(plan, "too little was seen for a forecast")
        largest = self._largest_load(now, forecast.rate)
        if not forecast.rate:
            return self._without_traffic(observed)
        if now - self._changed_at < REST_S:
            return WantedPlan(plan, f"the fleet changed {now - self._changed_at:.0f} s ago, and rests for {REST_S:g} s")
        try:
            expected = self._simulated(plan, forecast)
            if not observed.limits.allow(plan) or self._misses(observed, forecast, expected):
                return self._better(observed, forecast, expected)
            relieved = self._relieved(observed, forecast, expected)
            return relieved or self._cheaper(observed, replace(forecast, rate=largest), expected)
        except TercetError as error:
            return WantedPlan(plan, f"no simulation: {error}; the fleet stays")

    def _misses(self, observed: Observed, forecast: Forecast, expected: Expected) -> bool:
        """Whether the present fleet misses the objectives, and not only by a minute that is busier by chance."""
        share = observed.objectives.share
        if expected.attainment >= share - MISSED_BY_CHANCE * expected.chance:
            return False
        by_chance = BUSY_BY_CHANCE / math.sqrt(len(forecast.sample))
        calmer = self._simulated(observed.plan, replace(forecast, rate=forecast.rate * (1 - by_chance)))
        return calmer.attainment < share - MISSED_BY_CHANCE * calmer.chance

    def _relieved(self, observed: Observed, forecast: Forecast, expected: Expected) -> WantedPlan | None:
        """Another split, which costs nothing, if it bears the margin, and the present one, which is busy, does not."""
        plan, share = observed.plan, observed.objectives.share
        demand = demand_of(forecast.sample, forecast.rate, self._engine, observed.objectives)
        split = best_split(plan.engines, demand)
        if demand.share(plan) < BUSY_FULL or demand.share(split) > RELIEF * demand.share(plan):
            return None
        busier = self._with_margin(forecast, 1.0)
        if self._reverses(self._flipped, observed.now, plan, split, REVERSAL_S):
            return None
        strained = self._simulated(plan, busier)
        if strained.attainment >= share - MISSED_BY_CHANCE * strained.chance:
            return None
        got = self._simulated(split, busier)
        if got.attainment < share:
            return None
        reason = f"{plan} meets the objectives for {expected.attainment:.1%} at {forecast.why}, with a margin for "
        return WantedPlan(split, f"{reason}{strained.attainment:.1%}; {split} for {got.attainment:.1%}", got)

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
            self._unreachable = TriedLoad(observed.now, forecast.rate)
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
        """No fleet within the limits meets the objectives: what is worth its engines.

        All are simulated at a load that is busier by chance: a fleet at its limit does well for a minute.
        """
        plan, now = observed.plan, observed.now
        if self._settled.settles(now, forecast.rate, plan):
            return WantedPlan(plan, f"{said}; no fleet meets them at this load, and none was worth more", expected)
        found = self._climbed(observed, forecast, demand)
        values = worths(found)
        value, (best, got) = max(zip(values, found, strict=True), key=lambda each: each[0])
        needed = max(GAIN, WORTH_BY_CHANCE * max(expected.chance, got.chance))
        if value < values[0] + needed or self._reverses(self._planned_flip, now, plan, best, REVERSAL_S):
            self._fewer.clear()
            self._settled = TriedLoad(now, forecast.rate, plan)
            return WantedPlan(plan, f"{said}; no fleet meets them, and none is worth {needed:.0%} more", expected,
                              tuple(found[1:]))  # fmt: skip
        reason = f"{said}; no fleet meets them, and {best} is worth more, with {got.attainment:.1%}"
        if best.engines >= plan.engines:
            return WantedPlan(best, reason, got, tuple(found[1:]))
        if observed.starting or now - self._changed_at < SCALE_IN_REST_S or not self._saw_enough(now, PRICED_SEEN_S):
            return WantedPlan(plan, f"{reason}; engines are not given up yet", expected, tuple(found[1:]))
        return self._confirmed(plan, reason, best, got, found[1:])

    def _climbed(self, observed: Observed, forecast: Forecast, demand: EngineDemand) -> list[Simulated]:
        """The present fleet, its neighbours, and those of the one that is worth most, until none is worth more."""
        busier = replace(forecast, rate=forecast.rate * (1 + BUSY_BY_CHANCE / math.sqrt(len(forecast.sample))))
        found = [(observed.plan, self._simulated(observed.plan, busier))]
        tries = worth_simulating(observed.plan, demand, observed.limits)
        while tries and len(found) <= MOST_CLIMBED:
            found += [(each, self._simulated(each, busier)) for each in tries]
            values = worths(found)
            best, _ = found[values.index(max(values))]
            known = {each for each, _ in found}
            tries = [each for each in neighbours(best, observed.limits) if each not in known]
        return found

    def _cheaper(self, observed: Observed, forecast: Forecast, expected: Expected) -> WantedPlan:
        """Fewer engines, if they met the objectives with a larger margin at several looks in a row."""
        plan, share = observed.plan, observed.objectives.share
        fine = f"{plan} meets the objectives for {expected.attainment:.1%} at {forecast.why}"
        if plan.engines <= observed.limits.fewest:
            return WantedPlan(plan, f"{fine}; fewer engines are not allowed", expected)
        if observed.starting or observed.now - self._changed_at < SCALE_IN_REST_S:
            return WantedPlan(plan, f"{fine}; engines start, or the fleet has just changed", expected)
        if not self._saw_enough(observed.now, SEEN_S):
            return WantedPlan(plan, f"{fine}; no engine is given up before {SEEN_S:.0f} s of load were seen", expected)
        if self._too_few.plan == plan and self._too_few.holds(observed.now, forecast.rate):
            return WantedPlan(plan, f"{fine}; fewer engines did not do at this load", expected)
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
        return WantedPlan(plan, f"{fine}; with fewer engines and a margin it would not", expected, tuple(found))

    def _confirmed(
        self, plan: FleetPlan, reason: str, fewer: FleetPlan, got: Expected, found: list[Simulated]
    ) -> WantedPlan:
        """Act on the largest of the fleets that looks in a row found, for that ``reason``."""
        self._fewer.append(fewer)
        looks = len(self._fewer)
        if looks < LOOKS_FOR_SCALE_IN:
            return WantedPlan(plan, f"{reason}; look {looks} of {LOOKS_FOR_SCALE_IN}", got, tuple(found))
        chosen = max(self._fewer, key=lambda each: each.engines)
        self._fewer.clear()
        return WantedPlan(chosen, f"{reason}; {chosen} by {looks} looks", got, tuple(found))

    def _saw_enough(self, now: float, seconds: float) -> bool:
        """Whether load was seen for so many seconds."""
        return self._seen_from is not None and now - self._seen_from >= seconds

    def _reverses(
        self, flip: tuple[float, int], now: float, plan: FleetPlan, wanted: FleetPlan, within_s: float
    ) -> bool:
        """Whether roles would be changed back that were changed lately, by that ``flip``."""
        at, before = flip
        direction = _direction(plan, wanted)
        return direction != 0 and direction == -before and now - at < within_s

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
