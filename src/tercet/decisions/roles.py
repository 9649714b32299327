"""Roles of engines by their load. Pure: from a fleet, a policy returns a change of roles or the reason against it.

Looks at the engines give the demand of the last seconds; demand and objectives give the pressure of each role; a role
under lasting pressure gets engines from a role that has some to spare.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from tercet.decisions.cost.cost_model import OnlineFit
from tercet.protocol import Role
from tercet.settings.fleet_settings import Objectives, require_objectives

WINDOW_S = 5.0
"""Seconds over which the prefills' demand is measured."""
GROWTH_S = 3.0
"""Seconds over which the growth of decodes is measured: older growth tells little about the next seconds."""
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
STEP_SHARE = 0.9
"""Share of the TPOT objective that a step may take; the rest is for steps that prefill."""
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
Pressed = Literal["prefill", "decode"]
OTHER: dict[Pressed, Pressed] = {"prefill": "decode", "decode": "prefill"}


@dataclass(frozen=True)
class ObservedEngine:
    """The state of one engine now; ``able`` is True if it answers and may be picked.

    ``waiting_s`` is the prefill ahead of a new arrival, in seconds; ``busy_s`` is the time in seconds in which prefills
    ran, since the engine is observed. It decodes ``running`` sequences, which read ``contexts`` tokens of KV in a step;
    a recent step took ``step_s`` seconds (None: unknown); ``queued`` sequences wait to decode. ``kv_usage`` is the
    share of its KV cache in use.
    """

    name: str
    role: Role
    able: bool = True
    waiting_s: float = 0.0
    busy_s: float = 0.0
    running: int = 0
    queued: int = 0
    contexts: int = 0
    step_s: float | None = None
    kv_usage: float = 0.0

    @property
    def with_queued(self) -> float:
        """Factor by which its decodes and their contexts would grow if the queued sequences ran as well."""
        return (self.running + self.queued) / self.running if self.running else 1.0


@dataclass(frozen=True)
class Demand:
    """The work of a fleet: prefills as the number of engines that they keep busy, decodes as sequences at a time.

    ``prefill`` is the seconds of prefill computed per second, plus the growth of the line; ``waiting_s`` is that line
    over all engines, in seconds of one engine. ``decodes`` is the number of sequences that run or wait on engines that
    decode, with ``contexts`` tokens of KV, which need ``kv_usage`` KV caches; ``more_decodes`` and ``more_contexts``
    are the growth of both per second. Prefills were measured over the last ``over_s`` seconds.
    """

    prefill: float
    waiting_s: float
    decodes: float
    contexts: float
    kv_usage: float
    more_decodes: float
    more_contexts: float
    over_s: float


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
        self._step = OnlineFit((0.01, 1e-4, 1e-7))

    def observe(self, now: float, engines: Sequence[ObservedEngine]) -> Demand | None:
        """Record a sample of the engines; return the demand since the oldest sample, None for the first sample."""
        self._learn_steps(now, engines)
        decoding = [each for each in engines if each.role == "decode" and each.able]
        newest = _Sample(
            at=now,
            busy={each.name: each.busy_s for each in engines},
            waiting_s=sum(each.waiting_s for each in engines),
            decodes=sum(each.running + each.queued for each in decoding),
            contexts=sum(each.contexts * each.with_queued for each in decoding),
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

    @property
    def knows_steps(self) -> bool:
        """True if step times can be predicted."""
        return self._step.count >= STEPS_NEEDED

    def step_s(self, running: float, contexts: float) -> float:
        """Return the predicted seconds of a step that decodes ``running`` sequences with ``contexts`` tokens of KV."""
        return self._step.predict((1.0, running, contexts))

    def _learn_steps(self, now: float, engines: Sequence[ObservedEngine]) -> None:
        known = self._roles
        self._roles = {
            each.name: (each.role, known[each.name][1])
            if each.name in known and known[each.name][0] == each.role
            else (each.role, now)
            for each in engines
        }
        for each in engines:
            settled = now - self._roles[each.name][1] >= SETTLE_S
            if settled and each.role == "decode" and each.running and each.step_s and not each.waiting_s:
                self._step.observe((1.0, each.running, each.contexts), each.step_s)


class Pressures(NamedTuple):
    """The pressure of each role, expected some seconds ahead; 1 is the limit."""

    prefill: float
    decode: float

    @property
    def worse(self) -> float:
        """The larger of the two pressures."""
        return max(self)


def prefill_pressure(demand: Demand, engines: int, ttft: float) -> float:
    """Return the pressure of ``engines`` that prefill, with the objective ``ttft`` in seconds; 0 without traffic."""
    waiting = demand.waiting_s + LINE_AHEAD_S * max(0.0, demand.prefill - engines)
    return waiting / engines / (WAIT_SHARE * ttft)


def prefill_load(demand: Demand, engines: int, ttft: float) -> float:
    """Return the pressure if ``engines`` prefilled; at least their busy share, as busy engines make requests wait."""
    return max(prefill_pressure(demand, engines, ttft), demand.prefill / engines / BUSY_FULL)


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
class RoleLook:
    """The result of a look: pressures and demand (None: not known yet), the change of roles (None: no change), and why.

    ``roles`` counts the engines of each role that can be picked; ``at`` is the time of the look in seconds.
    """

    at: float
    why: str
    pressures: Pressures | None = None
    roles: dict[str, int] = field(default_factory=dict[str, int])
    demand: Demand | None = None
    flip: RoleFlip | None = None


class RolePolicy:
    """A policy that decides from repeated looks at a fleet, a fraction of a second apart; callers pass the time.

    Raises :class:`~tercet.protocol.BadRequest` without objectives for TTFT and TPOT.
    """

    def __init__(self, objectives: Objectives) -> None:
        require_objectives("auto", objectives)
        self._ttft, self._tpot = objectives.ttft or math.inf, objectives.tpot or math.inf
        self._history = FleetHistory()
        self._since: dict[Pressed, float] = {}
        self._roles: dict[str, str] = {}
        self._changed_at = -math.inf
        self._given_to: Pressed | None = None

    def look(self, now: float, engines: Sequence[ObservedEngine]) -> RoleLook:
        """Return the result for the engines at ``now``, in seconds; a change of roles counts as carried out at once."""
        # A change of roles that others made begins a rest; engines that come or go do not count as one.
        roles: dict[str, str] = {each.name: each.role for each in engines}
        if any(self._roles.get(name, role) != role for name, role in roles.items()):
            self._changed_at, self._given_to = now, None
        self._roles = roles
        demand = self._history.observe(now, engines)
        able: dict[Pressed, list[ObservedEngine]] = {
            role: [each for each in engines if each.able and each.role == role] for role in OTHER
        }
        counts: dict[str, int] = {role: len(found) for role, found in able.items()}
        if not able["prefill"] or not able["decode"]:
            self._since.clear()
            return RoleLook(now, "there must be an engine of each role that can be picked", roles=counts)
        if demand is None:
            return RoleLook(now, "this is the first look", roles=counts)
        if demand.decodes and not self._history.knows_steps:
            return RoleLook(now, "too few decode steps have been measured", roles=counts, demand=demand)
        pressures = Pressures(
            prefill_pressure(demand, counts["prefill"], self._ttft),
            decode_pressure(demand, counts["decode"], self._tpot, self._history),
        )
        flip, why = self._decided(now, able, demand, pressures)
        if flip is not None:
            self._took(now, flip)
        return RoleLook(now, why, pressures, counts, demand, flip)

    def step_s(self, decodes: float, contexts: float) -> float:
        """Return the predicted seconds of a step of ``decodes`` sequences with ``contexts`` tokens of KV in total."""
        return self._history.step_s(decodes, contexts)

    def may_give_to_prefill(self, now: float) -> bool:
        """True unless engines have begun to decode in the last :data:`REVERSAL_S` seconds."""
        return self._given_to != "decode" or now - self._changed_at >= REVERSAL_S

    def take(self, look: RoleLook, flip: RoleFlip) -> RoleLook:
        """Return ``look`` with a change of roles by another rule, which counts as carried out at once."""
        self._took(look.at, flip)
        return replace(look, why=flip.reason, flip=flip)

    def _took(self, now: float, flip: RoleFlip) -> None:
        self._changed_at, self._given_to = now, flip.role
        self._roles |= dict.fromkeys(flip.engines, flip.role)
        self._since.clear()

    def _decided(
        self, now: float, able: dict[Pressed, list[ObservedEngine]], demand: Demand, pressures: Pressures
    ) -> tuple[RoleFlip | None, str]:
        pressed = self._pressed(now, pressures)
        if pressed is None:
            return None, "no role is pressed"
        lasted = now - self._since[pressed]
        if lasted < LASTING_S:
            return None, f"{pressed} has been pressed for {lasted:.1f} s, and must be for {LASTING_S:g} s"
        giving = OTHER[pressed]
        if getattr(pressures, giving) >= 1.0:
            return None, f"{giving} is pressed as well: the fleet needs more engines"
        rest = REVERSAL_S if self._given_to == giving else REST_S
        rested = now - self._changed_at
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

    def _pressed(self, now: float, pressures: Pressures) -> Pressed | None:
        """Return the role with the larger pressure of at least 1, or None; record since when each role has had it."""
        for role in OTHER:
            if getattr(pressures, role) >= 1.0:
                self._since.setdefault(role, now)
            else:
                self._since.pop(role, None)
        return max(self._since, key=lambda role: getattr(pressures, role), default=None)

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
            after = Pressures(
                prefill_load(demand, len(able["prefill"]) + sign * number, self._ttft),
                decode_pressure(demand, len(able["decode"]) - sign * number, self._tpot, self._history),
            )
            if getattr(after, giving) <= MARGIN and (found is None or after.worse < found.worse):
                best, found = number, after
            if pressed == "prefill" and demand.prefill <= MARGIN * BUSY_FULL * (len(able["prefill"]) + number):
                break
        return best, found


def idlest(engines: Sequence[ObservedEngine], number: int) -> tuple[str, ...]:
    """Return the names of the ``number`` engines with the least work left: they change roles first."""
    by_work = sorted(engines, key=lambda each: (each.waiting_s, each.kv_usage, each.name))
    return tuple(each.name for each in by_work[:number])
