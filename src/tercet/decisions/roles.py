"""Roles of engines by their load: one controller, which ``--roles auto`` and the planner's guard both use.

Pure: :meth:`RoleController.on_tick` gets the observed fleet and returns effects, which its caller executes. Looks at
the engines give the demand of the last seconds; demand and objectives give the pressure of each role. Three rules:

1. Prefills that overload their engines beyond chance get at once the split of engines that bears them.
2. A role under lasting pressure gets engines from a role that has some to spare.
3. If roles do not help, and the limits allow it, engines are added.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from tercet.decisions.cost.engine_work import OnlineFit
from tercet.decisions.planning import (
    FEWEST_ENDED,
    RELIEF,
    STEP_SHARE,
    EngineCapacity,
    EngineDemand,
    FleetPlan,
    LearnedCapacity,
    Observed,
    ObservedEngine,
    answers_completed,
    demand_of,
    longest_step_s,
)
from tercet.protocol import Role
from tercet.settings.fleet_settings import Objectives, require_objectives

WINDOW_S = 5.0
"""Seconds over which the prefills' demand is measured."""
GROWTH_S = 3.0
"""Seconds over which the growth of decodes is measured: older growth says little about the next seconds."""
SETTLE_S = 1.0
"""Seconds after an engine appears or changes its role, in which its step times are ignored."""
STEPS_NEEDED = 4
"""Step times that must be measured before one is predicted."""
LINE_AHEAD_S = 5.0
"""Seconds for which the line of prefills is expected to grow as now."""
DECODES_AHEAD_S = 10.0
"""Seconds for which decodes are expected to grow as now: more, since a decode adds load for longer than a prefill."""
WAIT_SHARE = 0.5
"""Share of the TTFT objective that a request may wait in line; the rest is for its prefill."""
KV_FULL = 0.9
"""Share of the KV cache above which sequences wait for room, or are preempted."""
BUSY_FULL = 0.9
"""Share of their time that prefill engines may be busy: beyond it, chance alone makes requests wait."""
LASTING_S = 2.0
"""Seconds for which a role must be under pressure before it gets engines."""
REST_S = 10.0
"""Seconds after a change of roles without another change, so that its effect is measured first."""
REVERSAL_S = 20.0
"""Seconds after a change of roles without a change in the other direction."""
MARGIN = 0.8
"""Largest pressure that the role that gives engines may have after the change."""
BEYOND_CHANCE = 3.0
"""Standard deviations by which the work of the arrivals must exceed the capacity of the engines."""
ADDED_LASTING_S = 3.0
"""Seconds for which a fleet must be under pressure before engines are added: changes of roles come first."""
ADDED_REST_S = 10.0
"""Seconds after engines were added in which no more are added."""
WORK_OFF_S = 15.0
"""Seconds in which added engines should empty the line that has formed."""
Pressed = Literal["prefill", "decode"]
OTHER: dict[Pressed, Pressed] = {"prefill": "decode", "decode": "prefill"}


@dataclass(frozen=True)
class Demand:
    """The work of a fleet."""

    prefill: float  # engines that prefills keep busy: seconds computed per second, plus the growth of the line
    waiting_s: float  # that line over all engines, in seconds of one engine
    decodes: float  # sequences that run or wait on engines that decode
    contexts: float  # their tokens of KV
    kv_usage: float  # the KV caches that these need
    more_decodes: float  # growth per second
    more_contexts: float
    over_s: float  # seconds over which prefills were measured


@dataclass(frozen=True)
class _Sample:
    at: float
    busy: dict[str, float]
    waiting_s: float
    decodes: float
    contexts: float


class FleetHistory:
    """The last :data:`WINDOW_S` seconds of a fleet, by the caller's clock."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._roles: dict[str, tuple[Role, float]] = {}
        self.steps = OnlineFit((0.01, 1e-4, 1e-7))  # seconds of a step, by sequences and their tokens of KV

    def observe(self, now: float, engines: Sequence[ObservedEngine]) -> Demand | None:
        """Record a sample of the engines; return the demand since the oldest sample, None for the first sample."""
        known = self._roles
        self._roles = {
            each.name: (each.role, known[each.name][1])
            if each.name in known and known[each.name][0] == each.role
            else (each.role, now)
            for each in engines
        }
        for each in engines:
            # Only steps of an engine that has had its role for a while and prefills nothing: they only decode.
            settled = now - self._roles[each.name][1] >= SETTLE_S
            if settled and each.role == "decode" and each.running and each.step_s and not each.waiting_s:
                self.steps.observe((1.0, each.running, each.contexts), each.step_s)
        decoding = [each for each in engines if each.role == "decode" and each.able]
        newest = _Sample(
            at=now,
            busy={each.name: each.busy_s for each in engines},
            waiting_s=sum(each.waiting_s for each in engines),
            decodes=sum(each.running + each.queued for each in decoding),
            # As if the queued sequences ran as well, with contexts like those of the running ones.
            contexts=sum(
                each.contexts * ((each.running + each.queued) / each.running if each.running else 1.0)
                for each in decoding
            ),
        )
        self._samples.append(newest)
        while len(self._samples) > 2 and now - self._samples[0].at > WINDOW_S:
            self._samples.popleft()  # the last two stay: looks of a starved process are rare
        oldest = self._samples[0]
        passed = now - oldest.at
        if passed <= 0:
            return None
        computed = sum(max(0.0, busy - oldest.busy.get(name, busy)) for name, busy in newest.busy.items())
        grown = newest.waiting_s - oldest.waiting_s
        recent = next(each for each in self._samples if now - each.at <= GROWTH_S)
        lately = now - recent.at
        return Demand(
            prefill=max(0.0, (computed + grown) / passed),
            waiting_s=newest.waiting_s,
            decodes=newest.decodes,
            contexts=newest.contexts,
            kv_usage=sum(each.kv_usage for each in decoding),
            more_decodes=(newest.decodes - recent.decodes) / lately if lately else 0.0,
            more_contexts=(newest.contexts - recent.contexts) / lately if lately else 0.0,
            over_s=passed,
        )

    def step_s(self, running: float, contexts: float) -> float:
        """Return the predicted seconds of a step that decodes ``running`` sequences with ``contexts`` tokens of KV."""
        return self.steps.predict((1.0, running, contexts))


class Pressures(NamedTuple):
    """The pressure of each role, expected some seconds ahead; 1 is the limit."""

    prefill: float
    decode: float

    @property
    def worse(self) -> float:
        return max(self)


def prefill_pressure(demand: Demand, engines: int, ttft: float) -> float:
    """Return the pressure of ``engines`` that prefill, with the objective ``ttft`` in seconds; 0 without traffic."""
    waiting = demand.waiting_s + LINE_AHEAD_S * max(0.0, demand.prefill - engines)
    return waiting / engines / (WAIT_SHARE * ttft)


def decode_pressure(demand: Demand, engines: int, tpot: float, history: FleetHistory) -> float:
    """Return the pressure of ``engines`` that decode, with the objective ``tpot`` in seconds; 0 without traffic."""
    if demand.decodes <= 0 or demand.contexts <= 0:
        return 0.0
    decodes = demand.decodes + DECODES_AHEAD_S * max(0.0, demand.more_decodes)
    contexts = demand.contexts + DECODES_AHEAD_S * max(0.0, demand.more_contexts)
    by_step = history.step_s(decodes / engines, contexts / engines) / (STEP_SHARE * tpot)
    return max(by_step, demand.kv_usage * (contexts / demand.contexts) / engines / KV_FULL)


@dataclass(frozen=True)
class RoleFlip:
    """A change of roles: ``engines`` get the role ``role``, for the ``reason``."""

    engines: tuple[str, ...]
    role: Pressed
    reason: str


@dataclass(frozen=True)
class LastFlip:
    """The last change of roles: its time, and the role that engines were given; None if it is not known."""

    at: float = -math.inf
    given_to: Pressed | None = None

    def then(self, now: float, before: FleetPlan, after: FleetPlan) -> LastFlip:
        """Return the last flip after a change of the fleet: this one, unless engines changed from role to role."""
        gained = _given_to(before, after)
        return self if gained is None else LastFlip(now, gained)

    def is_undone_by(self, now: float, before: FleetPlan, after: FleetPlan, within_s: float) -> bool:
        """Return True if a change of the fleet gives back what this one gave less than ``within_s`` seconds ago."""
        gained = _given_to(before, after)
        return gained is not None and self.forbids(now, gained, within_s)

    def forbids(self, now: float, gaining: Pressed, within_s: float) -> bool:
        """Return True if ``gaining`` would get engines back that the other role got within these seconds."""
        return self.given_to == OTHER[gaining] and now - self.at < within_s


def _given_to(before: FleetPlan, after: FleetPlan) -> Pressed | None:
    if after.prefill > before.prefill and after.decode < before.decode:
        return "prefill"
    return "decode" if after.prefill < before.prefill and after.decode > before.decode else None


@dataclass(frozen=True)
class RoleEffects:
    """The result of a tick: what to change, and why or why not."""

    at: float
    """Time of the tick in seconds of the observer's clock."""
    why: str
    pressures: Pressures | None = None
    """None while they are not known."""
    roles: dict[str, int] = field(default_factory=dict[str, int])
    """Number of engines of each role that can be picked."""
    demand: Demand | None = None
    """None at the first tick."""
    plan: FleetPlan | None = None
    """The fleet to change to; None to change nothing."""
    flip: RoleFlip | None = None
    """The engines that change roles; None if ``plan`` is None or adds engines."""


class RoleController:
    """A controller that decides from repeated ticks, a fraction of a second apart; callers pass the time.

    A change counts as made at once. If its caller did not make it, the next tick finds other roles than expected, which
    begins a rest as a change by an operator does.

    ``engine`` is the capacity of one engine. Without it the capacity is learned: ``prefill_s`` returns the predicted
    seconds of a prompt, and steps are measured. Raises :class:`~tercet.protocol.BadRequest` without objectives for TTFT
    and TPOT.
    """

    def __init__(
        self, objectives: Objectives, engine: EngineCapacity | None = None,
        prefill_s: Callable[[int], float] | None = None,
    ) -> None:  # fmt: skip
        require_objectives("auto", objectives)
        self._ttft, self._tpot = objectives.ttft or math.inf, objectives.tpot or math.inf
        self._engine, self._prefill_s = engine, prefill_s
        self._history = FleetHistory()
        self._since: dict[Pressed, float] = {}
        self._roles: dict[str, str] = {}
        self._flipped = LastFlip()
        self._short_since: float | None = None
        self._added_at = -math.inf

    def on_tick(self, observed: Observed) -> RoleEffects:
        """Return the effects for the fleet that was observed; a change counts as made."""
        now, engines = observed.now, observed.engines
        # A change of roles that others made begins a rest; engines that come or go do not count as one.
        roles: dict[str, str] = {each.name: each.role for each in engines}
        if any(self._roles.get(name, role) != role for name, role in roles.items()):
            self._flipped = LastFlip(now)
        self._roles = roles
        # Observed at each tick, also while roles rest: the history must have no gaps.
        demand = self._history.observe(now, engines)
        able: dict[Pressed, list[ObservedEngine]] = {
            role: [each for each in engines if each.able and each.role == role] for role in OTHER
        }
        counts: dict[str, int] = {role: len(of_role) for role, of_role in able.items()}
        effects = RoleEffects(now, "this is the first look", roles=counts, demand=demand)
        if not able["prefill"] or not able["decode"]:
            self._since.clear()
            why = "there must be an engine of each role that can be picked"
            return self._grown(observed, replace(effects, why=why, demand=None))
        if demand is not None and demand.decodes and self._history.steps.count < STEPS_NEEDED:
            effects = replace(effects, why="too few decode steps have been measured")
        elif demand is not None:
            pressures = Pressures(
                prefill_pressure(demand, counts["prefill"], self._ttft),
                decode_pressure(demand, counts["decode"], self._tpot, self._history),
            )
            effects = replace(effects, pressures=pressures)
        engine = self._engine
        if engine is None and self._prefill_s is not None and effects.pressures is not None:
            engine = LearnedCapacity(self._prefill_s, self._history.step_s, observed.kv_tokens)
        split = None if engine is None or demand is None else overload_split(observed, demand, engine)
        may_take = not self._flipped.forbids(now, "prefill", REVERSAL_S)
        if split is not None and demand is not None and may_take:
            number = split.prefill - observed.plan.prefill
            why = (
                f"the prefills of the last {demand.over_s:.1f} s need {demand.prefill:.1f} engines, and "
                f"{observed.plan.prefill} prefill"
            )
            flip, plan = RoleFlip(idlest(able["decode"], number), "prefill", why), split
        else:
            flip, why = self._lasting(able, effects)
            by = 0 if flip is None else len(flip.engines) if flip.role == "prefill" else -len(flip.engines)
            plan = FleetPlan(observed.plan.prefill + by, observed.plan.decode - by)
        effects = replace(effects, why=why)
        if split is not None or flip is not None:
            self._short_since = None
        if flip is None:
            return effects if split is not None else self._grown(observed, effects)
        self._flipped = LastFlip(now, flip.role)
        # Expected from now on, so that the next tick does not take our own change for an operator's.
        self._roles |= dict.fromkeys(flip.engines, flip.role)
        self._since.clear()
        return replace(effects, plan=plan, flip=flip)

    def _lasting(self, able: dict[Pressed, list[ObservedEngine]], effects: RoleEffects) -> tuple[RoleFlip | None, str]:
        """Return the change for a role that has been under pressure for long, and why; or None, and why not."""
        now, pressures, demand = effects.at, effects.pressures, effects.demand
        if pressures is None or demand is None:
            return None, effects.why
        # Since when each role has had a pressure of at least 1.
        for role in OTHER:
            if getattr(pressures, role) >= 1.0:
                self._since.setdefault(role, now)
            else:
                self._since.pop(role, None)
        pressed = max(self._since, key=lambda role: getattr(pressures, role), default=None)
        if pressed is None:
            return None, "no role is pressed"
        lasted = now - self._since[pressed]
        if lasted < LASTING_S:
            return None, f"{pressed} has been pressed for {lasted:.1f} s, and must be for {LASTING_S:g} s"
        # Both pressed: a change of roles would only move the shortage.
        giving = OTHER[pressed]
        if getattr(pressures, giving) >= 1.0:
            return None, f"{giving} is pressed as well: the fleet needs more engines"
        # Taking back what was given a moment ago needs a longer rest: otherwise roles swing with the load.
        rest = REVERSAL_S if self._flipped.forbids(now, pressed, REVERSAL_S) else REST_S
        rested = now - self._flipped.at
        if rested < rest:
            return None, f"the roles changed {rested:.1f} s ago, and rest for {rest:g} s"
        number, after = self._best(pressed, able, demand)
        if not number or after is None:
            left = len(able[giving]) - 1
            few = "1 engine" if left == 1 else f"{left} engines"
            return None, f"{giving} has no engine to spare: {few} would not serve its load with a margin"
        chosen = idlest(able[giving], number)
        reason = (
            f"{pressed} at {getattr(pressures, pressed):.0%} of its limit for {lasted:.1f} s; expected after the "
            f"change: prefill {after.prefill:.0%}, decode {after.decode:.0%}"
        )
        return RoleFlip(chosen, pressed, reason), reason

    def _grown(self, observed: Observed, effects: RoleEffects) -> RoleEffects:
        """Return the effects with engines added, if roles have not helped for long and the limits allow more."""
        now, pressures, demand = observed.now, effects.pressures, effects.demand
        if pressures is None or demand is None or pressures.worse < 1:
            self._short_since = None
            return effects
        if self._short_since is None:
            self._short_since = now
        lasted, room, plan = now - self._short_since, observed.limits.most - observed.plan.engines, observed.plan
        rests = now - self._added_at < ADDED_REST_S or observed.starting > 0
        if lasted < ADDED_LASTING_S or rests or room <= 0:
            return effects
        if pressures.prefill >= pressures.decode:
            needed = math.ceil(demand.prefill / BUSY_FULL + demand.waiting_s / WORK_OFF_S) - plan.prefill
            plan = replace(plan, prefill=plan.prefill + min(room, max(1, needed)))
        else:
            # The pressure is in proportion to the engines' number, so this many more bring it to 1.
            needed = math.ceil(plan.decode * (pressures.decode - 1))
            plan = replace(plan, decode=plan.decode + min(room, max(1, needed)))
        self._added_at, self._short_since = now, None
        why = (
            f"prefill at {pressures.prefill:.0%}, decode at {pressures.decode:.0%} of the limit for {lasted:.1f} s, "
            f"and {effects.why}"
        )
        return replace(effects, why=why, plan=plan)

    def _best(
        self, pressed: Pressed, able: dict[Pressed, list[ObservedEngine]], demand: Demand
    ) -> tuple[int, Pressures | None]:
        """Return the number of engines that change roles, with the pressures after that; ``(0, None)`` if none may.

        The number makes the worse pressure least. For prefills, it does not exceed the need of the arrivals with a
        margin: requests in their line do not decode yet, so the decodes will soon need more than they seem to.
        """
        giving, sign = OTHER[pressed], 1 if pressed == "prefill" else -1
        best, found = 0, None
        for number in range(1, len(able[giving])):
            prefills = len(able["prefill"]) + sign * number
            after = Pressures(
                # At least their busy share: busy engines make requests wait, also if none waits now.
                max(prefill_pressure(demand, prefills, self._ttft), demand.prefill / prefills / BUSY_FULL),
                decode_pressure(demand, len(able["decode"]) - sign * number, self._tpot, self._history),
            )
            # The giving role keeps a margin: a change that only moves the shortage would be taken back.
            if getattr(after, giving) <= MARGIN and (found is None or after.worse < found.worse):
                best, found = number, after
            if pressed == "prefill" and demand.prefill <= MARGIN * BUSY_FULL * (len(able["prefill"]) + number):
                break
        return best, found


def idlest(engines: Sequence[ObservedEngine], number: int) -> tuple[str, ...]:
    """Return the names of the ``number`` engines with the least work left: they change roles first."""
    by_work = sorted(engines, key=lambda each: (each.waiting_s, each.kv_usage, each.name))
    return tuple(each.name for each in by_work[:number])


def overload_split(observed: Observed, measured: Demand, engine: EngineCapacity) -> FleetPlan | None:
    """Return the split of the same engines that bears the load, if prefills overload the present split; else None.

    Prefills overload it if their line, with its growth, breaks the objective for TTFT (as for roles), and if their
    demand exceeds the engines by :data:`BEYOND_CHANCE` standard deviations of Poisson arrivals. The demand is the
    ``measured`` one, in which cached prompts cost little, but at most the cost of the arrivals of the same seconds by
    ``engine``: times of the first requests mislead. Such evidence need not last: one second of arrivals is enough at
    45 requests/s on one engine that computes 15/s. The demand of decodes follows from the arrivals by Little's law
    (:func:`~tercet.decisions.planning.demand_of`), since requests that wait in line do not decode yet; their present
    demand is its lower bound. Some answers must have ended, since before that the demand of the others is not known.
    """
    plan, ttft = observed.plan, observed.objectives.ttft
    able = sum(each.able and each.role == "prefill" for each in observed.engines)
    came = [each for each in observed.arrivals if observed.now - each.at <= measured.over_s]
    if ttft is None or observed.starting or able != plan.prefill or sum(each.ended for each in came) < FEWEST_ENDED:
        return None
    if prefill_pressure(measured, able, ttft) < 1:
        return None
    rate = len(came) / max(observed.now - came[0].at, 1e-3) / observed.seen
    by_arrivals = demand_of(answers_completed(came), rate, engine, observed.objectives)
    prefill = min(by_arrivals.prefill, measured.prefill)
    # The standard deviation of the work of these prompts, as a share of that work, for Poisson arrivals.
    work = sum(each.prompt_tokens for each in came)
    chance = math.sqrt(sum(each.prompt_tokens**2 for each in came)) / max(1, work)
    if prefill * (1 - BEYOND_CHANCE * chance) < able:
        return None
    # One standard deviation more: to give too few engines to the overloaded role would be the worse error.
    decode = by_arrivals.decode
    if measured.decodes > 0:  # the engines that the present decodes keep busy
        context, tpot = measured.contexts / measured.decodes, longest_step_s(observed.objectives)
        decode = max(decode, measured.decodes / engine.decodes(context, tpot))
    demand = EngineDemand(prefill * (1 + chance), decode)
    splits = [FleetPlan(plan.engines - number, number) for number in range(1, plan.engines)]
    best = min((each for each in splits if decode <= BUSY_FULL * each.decode), key=demand.share, default=None)
    if best is None or best.prefill <= plan.prefill or demand.share(best) > RELIEF * demand.share(plan):
        return None
    return best
