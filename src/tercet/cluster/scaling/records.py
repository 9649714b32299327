"""Calls to scale a fleet, and the records of its owner about scaling, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tercet.protocol import BadRequest, Role

ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
DRAIN_SECONDS = 300.0
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
        """Count the engines with these roles."""
        found = Counter(roles)
        return cls(found["prefill"], found["decode"], found["both"])

    def as_roles(self) -> Mapping[Role, int]:
        """Return the numbers as a mapping by role."""
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
        given: dict[Role, int | None] = {"prefill": self.prefill, "decode": self.decode, "both": self.both}
        if all(count is None for count in given.values()):
            raise BadRequest("COUNTS: is empty; give numbers, such as prefill=3 decode=5", "COUNTS")
        wanted = Counts(*(now if (count := given[role]) is None else count for role, now in present.as_roles().items()))
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
