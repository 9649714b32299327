"""A policy that changes engines' roles when one role is under pressure and the other one has engines to spare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tercet.decisions.roles.observed import Demand, FleetHistory, ObservedEngine
from tercet.decisions.roles.pressures import BUSY_FULL, Pressures, decode_pressure, prefill_load, prefill_pressure
from tercet.settings.role_settings import Objectives, require_objectives

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
        self._note_changes(now, engines)
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

    def _note_changes(self, now: float, engines: Sequence[ObservedEngine]) -> None:
        """Start the rest after a change of roles that others made; engines that come or go do not count as one."""
        roles = {each.name: each.role for each in engines}
        if any(self._roles.get(name, role) != role for name, role in roles.items()):
            self._changed_at, self._given_to = now, None
        self._roles = dict(roles)

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
            return None, f"{giving} has no engine to spare: {_engines(left)} would not serve its load with a margin"
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
    return tuple(each.name for each in sorted(engines, key=_idle)[:number])


def _idle(engine: ObservedEngine) -> tuple[float, float, str]:
    """Return the key that orders engines by the work that is left."""
    return engine.waiting_s, engine.kv_usage, engine.name


def _engines(number: int) -> str:
    return "1 engine" if number == 1 else f"{number} engines"
