"""Decides without I/O what is done to make a fleet as large as it is wanted.

What serves is never fewer than before and than wanted: roles change first, then engines start, and only when all of
those serve are others drained, and each stopped once it is empty. If an engine does not start, nothing is drained, and
the fleet stays as it is then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tercet.cluster.scaling.records import Counts, EngineStep, Phase, State
from tercet.protocol import Role


@dataclass(frozen=True)
class Flip:
    """Give an engine another role."""

    name: str
    role: Role


@dataclass(frozen=True)
class Start:
    """Start an engine; it is a member once it serves."""

    name: str
    role: Role


@dataclass(frozen=True)
class Drain:
    """Have an engine picked for nothing new, and wait until nothing runs on it."""

    name: str


@dataclass(frozen=True)
class Stop:
    """Take an engine out of the fleet, and end it."""

    name: str


Do = Flip | Start | Drain | Stop


@dataclass(frozen=True)
class Present:
    """An engine that serves: its role, and how much runs on it."""

    name: str
    role: Role
    in_flight: int = 0


def newest(name: str) -> int:
    """The number at the end of an engine's name; -1 without one."""
    number = re.search(r"[0-9]+$", name)
    return int(number[0]) if number else -1


def names_after(used: Iterable[str], role: Role, count: int) -> list[str]:
    """Names of ``count`` more engines of a role; the name of an engine that has gone is not used again."""
    prefix = "engine" if role == "both" else role
    first = max((newest(name) for name in used if name.rpartition("-")[0] == prefix), default=-1) + 1
    return [f"{prefix}-{first + index}" for index in range(count)]


class Scaling:
    """One change of a fleet, from ``present`` engines to ``wanted`` ones. ``used`` are all names there ever were.

    :meth:`begin`, and each method that records an event, return what is to be done next.
    """

    def __init__(self, present: Sequence[Present], wanted: Counts, used: Iterable[str] = ()) -> None:
        self.wanted = wanted
        self.why = ""
        self._phase: dict[str, Phase] = {each.name: "serving" for each in present}
        self._role: dict[str, Role] = {each.name: each.role for each in present}
        self._flips, surplus, missing = _flips(present, wanted)
        self._leaving = [each.name for each in surplus]
        names = {*used, *self._role}
        self._starts = [
            Start(name, role) for role, count in missing.items() for name in names_after(names, role, count)
        ]
        self._open = set[str]()
        self._left: dict[str, int] = {}

    @property
    def starting(self) -> int:
        """How many engines it starts."""
        return len(self._starts)

    @property
    def state(self) -> State:
        """Whether something is still to be done, and whether all went well."""
        if self._open:
            return "under_way"
        return "failed" if self.why else "done"

    @property
    def present(self) -> Counts:
        """Engines that serve, or drain."""
        return Counts.of(role for name, role in self._role.items() if self._phase[name] in ("serving", "draining"))

    @property
    def engines(self) -> tuple[EngineStep, ...]:
        """Every engine that is not gone."""
        return tuple(
            EngineStep(name, role, self._phase[name], self._left.get(name, 0)) for name, role in self._role.items()
        )

    def begin(self) -> list[Do]:
        """The first things to do; nothing if the fleet is as it is wanted."""
        for start in self._starts:
            self._phase[start.name], self._role[start.name] = "starting", start.role
        self._open = {each.name for each in (*self._flips, *self._starts)}
        return [*self._flips, *self._starts] or self._drains()

    def flipped(self, name: str, role: Role) -> list[Do]:
        """The engine has that role."""
        self._role[name] = role
        return self._after(name)

    def ready(self, name: str) -> list[Do]:
        """An engine that was started is a member that serves."""
        self._phase[name] = "serving"
        return self._after(name)

    def runs(self, name: str, left: int) -> None:
        """The number of sequences that are left on an engine that drains."""
        self._left[name] = left

    def drained(self, name: str) -> list[Do]:
        """Nothing runs on the engine, or the time for that is over."""
        self._phase[name] = "stopping"
        return [Stop(name)]

    def gone(self, name: str) -> list[Do]:
        """The engine has ended, and has left the fleet."""
        del self._phase[name], self._role[name]
        self._left.pop(name, None)
        self._open.discard(name)
        return []

    def failed(self, name: str, why: str) -> list[Do]:
        """What was to be done with the engine has not worked; one that was to start has been ended."""
        self.why = self.why or f"{name}: {why}"
        if self._phase[name] == "starting":
            del self._phase[name], self._role[name]
        elif self._phase[name] != "stopping":
            self._phase[name] = "serving"
        return self._after(name)

    def _after(self, name: str) -> list[Do]:
        self._open.discard(name)
        return self._drains() if not self._open and not self.why else []

    def _drains(self) -> list[Do]:
        leaving, self._leaving = self._leaving, []
        self._open = set(leaving)
        self._phase |= dict.fromkeys(leaving, "draining")
        return [Drain(name) for name in leaving]


def _flips(present: Sequence[Present], wanted: Counts) -> tuple[list[Flip], list[Present], dict[Role, int]]:
    """Engines that get another role, those that are too many, and how many of each role are missing.

    Too many are those on which the least runs, of equal ones the newest.
    """
    idle = sorted(present, key=lambda each: (each.in_flight, -newest(each.name)))
    surplus, missing = list[Present](), dict[Role, int]()
    for role, count in wanted.as_roles().items():
        here = [each for each in idle if each.role == role]
        surplus += here[: max(0, len(here) - count)]
        missing[role] = max(0, count - len(here))
    flips = list[Flip]()
    for role in missing:
        while missing[role] and surplus:
            flips.append(Flip(surplus.pop(0).name, role))
            missing[role] -= 1
    return flips, surplus, missing
