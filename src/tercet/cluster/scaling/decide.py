"""Decisions, without I/O, about the steps from a fleet's present size to the wanted size.

The number of serving engines is at least the smaller of old and wanted number: roles change first, then engines start.
Only when all of these serve, other engines are drained, and each is stopped when it is empty. If an engine does not
start, no engine is drained, and the fleet stays as it is at that time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tercet.protocol import BadRequest, Role

ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
DRAIN_SECONDS = 300.0
SELECTOR = "tercet/group"
MOST = 1024
Phase = Literal["starting", "serving", "draining", "stopping"]
State = Literal["under_way", "done", "failed"]


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Number of engines of each role."""

    prefill: int = 0
    decode: int = 0
    both: int = 0

    @classmethod
    def of(cls, roles: Iterable[Role]) -> Counts:
        found = Counter(roles)
        return cls(found["prefill"], found["decode"], found["both"])

    def as_roles(self) -> Mapping[Role, int]:
        return {"prefill": self.prefill, "decode": self.decode, "both": self.both}

    def __str__(self) -> str:
        return " ".join(f"{role}={count}" for role, count in self.as_roles().items() if count) or "no engine"


Wanted = Annotated[int, Meta(ge=0, le=MOST)]


class ScaleCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The wanted number of engines of each role; None keeps a role's number.

    ``drain_seconds`` is the longest time in which sequences of an engine that leaves are moved or finish.
    """

    prefill: Wanted | None = None
    decode: Wanted | None = None
    both: Wanted | None = None
    drain_seconds: Annotated[float, Meta(ge=0, le=86_400)] = DRAIN_SECONDS

    def counts(self, present: Counts) -> Counts:
        """Return the wanted numbers for a fleet that has ``present``. Raises :class:`~tercet.protocol.BadRequest`."""
        given = self.prefill, self.decode, self.both
        if given == (None, None, None):
            raise BadRequest("COUNTS: is empty; give numbers, such as prefill=3 decode=5", "COUNTS")
        numbers = zip(given, present.as_roles().values(), strict=True)
        wanted = Counts(*(now if count is None else count for count, now in numbers))
        if not wanted.both and not (wanted.prefill and wanted.decode):
            raise BadRequest(
                f"COUNTS: {wanted} leaves no engine to {'decode' if wanted.prefill else 'prefill'}; give at least one "
                "engine for each role, or one for both",
                "COUNTS",
            )
        return wanted


class EngineStep(msgspec.Struct, frozen=True):
    """One engine of a fleet during scaling; ``left`` is its number of sequences while it drains."""

    name: str
    role: Role
    phase: Phase
    left: int = 0


class ScaleRecord(msgspec.Struct, frozen=True):
    """One scaling of a fleet; its ``number`` counts from 1, and 0 means that there was none.

    ``present`` counts engines that serve; ``why`` is the reason of a failure; ``seconds`` is the duration so far.
    """

    number: int
    state: State
    wanted: Counts
    present: Counts
    engines: tuple[EngineStep, ...]
    seconds: float = 0.0
    why: str = ""


def parse_counts(given: Sequence[str]) -> Mapping[Role, int]:
    """Return ``prefill=3 decode=5`` as numbers by role. Raises :class:`~tercet.protocol.BadRequest`."""
    found: dict[Role, int] = {}
    for each in given:
        role, _, count = each.partition("=")
        known: Role | None = next((name for name in ROLES if name == role), None)
        if known is None or not count.isdecimal() or len(count) > 4:
            raise BadRequest(f"COUNTS: {each!r} is not ROLE=NUMBER; ROLE is prefill, decode or both", "COUNTS")
        if known in found:
            raise BadRequest(f"COUNTS: {known} is given twice", "COUNTS")
        found[known] = int(count)
    return found


@dataclass(frozen=True)
class Flip:
    """Step: change the role of an engine."""

    name: str
    role: Role


@dataclass(frozen=True)
class Start:
    """Step: start an engine; it becomes a member when it serves."""

    name: str
    role: Role


@dataclass(frozen=True)
class Drain:
    """Step: stop new requests to an engine, and wait until it has no sequences."""

    name: str


@dataclass(frozen=True)
class Stop:
    """Step: remove an engine from the fleet, and stop it."""

    name: str


Do = Flip | Start | Drain | Stop


@dataclass(frozen=True)
class Present:
    """An engine that serves: its name, its role, and its number of sequences."""

    name: str
    role: Role
    in_flight: int = 0


def newest(name: str) -> int:
    """Return the number at the end of an engine's name; -1 without one."""
    number = re.search(r"[0-9]+$", name)
    return int(number[0]) if number else -1


def names_after(used: Iterable[str], role: Role, count: int) -> list[str]:
    """Return names for ``count`` more engines of a role; names of removed engines are not used again."""
    prefix = "engine" if role == "both" else role
    # A name that returned would bring back its predecessor's metrics, logs and beliefs.
    first = max((newest(name) for name in used if name.rpartition("-")[0] == prefix), default=-1) + 1
    return [f"{prefix}-{first + index}" for index in range(count)]


class Scaling:
    """One change of a fleet, from ``present`` engines to the ``wanted`` numbers. ``used`` are all names so far.

    :meth:`begin`, and each method that records an event, return the next steps.
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
        return len(self._starts)

    @property
    def state(self) -> State:
        """``under_way`` while steps are open, then ``done``, or ``failed`` after a failed step."""
        if self._open:
            return "under_way"
        return "failed" if self.why else "done"

    @property
    def present(self) -> Counts:
        """Numbers of engines that serve or drain."""
        return Counts.of(role for name, role in self._role.items() if self._phase[name] in ("serving", "draining"))

    @property
    def engines(self) -> tuple[EngineStep, ...]:
        """All engines that are not removed, with their phases."""
        return tuple(
            EngineStep(name, role, self._phase[name], self._left.get(name, 0)) for name, role in self._role.items()
        )

    def begin(self) -> list[Do]:
        """Return the first steps; none if the fleet has the wanted size already."""
        for start in self._starts:
            self._phase[start.name], self._role[start.name] = "starting", start.role
        # Drains come after these: an engine that leaves is replaced before.
        self._open = {each.name for each in (*self._flips, *self._starts)}
        return [*self._flips, *self._starts] or self._drains()

    def flipped(self, name: str, role: Role) -> list[Do]:
        """Record that the engine has the role ``role``; return the next steps."""
        self._role[name] = role
        return self._after(name)

    def ready(self, name: str) -> list[Do]:
        """Record that a started engine serves as a member; return the next steps."""
        self._phase[name] = "serving"
        return self._after(name)

    def runs(self, name: str, left: int) -> None:
        """Record the number of sequences that are left on a draining engine."""
        self._left[name] = left

    def drained(self, name: str) -> list[Do]:
        """Record that the engine is empty, or that its drain timed out; return the next steps."""
        self._phase[name] = "stopping"
        return [Stop(name)]

    def gone(self, name: str) -> list[Do]:
        """Record that the engine has ended and is removed from the fleet; return the next steps."""
        del self._phase[name], self._role[name]
        self._left.pop(name, None)
        self._open.discard(name)
        return []

    def failed(self, name: str, why: str) -> list[Do]:
        """Record that a step failed; return the next steps. An engine that failed to start has been stopped already."""
        # The first failure is reported: later ones often follow from it.
        self.why = self.why or f"{name}: {why}"
        if self._phase[name] == "starting":
            del self._phase[name], self._role[name]
        elif self._phase[name] != "stopping":
            # It has its requests and its KV still, so it serves on; one that stops has neither.
            self._phase[name] = "serving"
        return self._after(name)

    def _after(self, name: str) -> list[Do]:
        self._open.discard(name)
        # After a failed start nothing drains: a fleet that is too large serves, one that is too small does not.
        return self._drains() if not self._open and not self.why else []

    def _drains(self) -> list[Do]:
        leaving, self._leaving = self._leaving, []
        self._open = set(leaving)
        self._phase |= dict.fromkeys(leaving, "draining")
        return [Drain(name) for name in leaving]


def _flips(present: Sequence[Present], wanted: Counts) -> tuple[list[Flip], list[Present], dict[Role, int]]:
    """Return the changes of roles, the surplus engines, and the number of missing engines of each role.

    Surplus engines are those with the fewest sequences, and the newest of equal ones.
    """
    # The most idle engines change or leave first, since each of their sequences has to move.
    idle = sorted(present, key=lambda each: (each.in_flight, -newest(each.name)))
    surplus, missing = list[Present](), dict[Role, int]()
    for role, count in wanted.as_roles().items():
        here = [each for each in idle if each.role == role]
        surplus += here[: max(0, len(here) - count)]
        missing[role] = max(0, count - len(here))
    flips = list[Flip]()
    for role in missing:
        while missing[role] and surplus:
            # A changed role costs no start and frees no KV, so it comes before both.
            flips.append(Flip(surplus.pop(0).name, role))
            missing[role] -= 1
    return flips, surplus, missing
