"""What is asked of a fleet that is to grow or shrink, and what its owner says about it, as plain data."""

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
    """Engines of each role."""

    prefill: int = 0
    decode: int = 0
    both: int = 0

    @classmethod
    def of(cls, roles: Iterable[Role]) -> Counts:
        """How many engines there are of each of these roles."""
        found = Counter(roles)
        return cls(found["prefill"], found["decode"], found["both"])

    def as_roles(self) -> Mapping[Role, int]:
        """The same, by role."""
        return {"prefill": self.prefill, "decode": self.decode, "both": self.both}

    def __str__(self) -> str:
        return " ".join(f"{role}={count}" for role, count in self.as_roles().items() if count) or "no engine"


Wanted = Annotated[int, Meta(ge=0, le=MOST)]


class ScaleCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How many engines there shall be of each role; None leaves a role as it is.

    ``drain_seconds`` is the longest time in which sequences of an engine that leaves move, or finish where they are.
    """

    prefill: Wanted | None = None
    decode: Wanted | None = None
    both: Wanted | None = None
    drain_seconds: Annotated[float, Meta(ge=0, le=86_400)] = DRAIN_SECONDS

    def counts(self, present: Counts) -> Counts:
        """What is wanted of a fleet that has ``present``. Raises :class:`~tercet.protocol.BadRequest`."""
        given: dict[Role, int | None] = {"prefill": self.prefill, "decode": self.decode, "both": self.both}
        if all(count is None for count in given.values()):
            raise BadRequest("COUNTS: say how many, such as prefill=3 decode=5", "COUNTS")
        wanted = Counts(*(now if (count := given[role]) is None else count for role, now in present.as_roles().items()))
        if not wanted.both and not (wanted.prefill and wanted.decode):
            raise BadRequest(
                f"COUNTS: {wanted} leaves nothing to {'decode' if wanted.prefill else 'prefill'}; at least one engine "
                "of each role is needed, or one for both",
                "COUNTS",
            )
        return wanted


class EngineStep(msgspec.Struct, frozen=True):
    """One engine of a fleet that is scaled; ``left`` are its sequences while it drains."""

    name: str
    role: Role
    phase: Phase
    left: int = 0


class ScaleRecord(msgspec.Struct, frozen=True):
    """The scaling of that ``number``: the first one of a fleet is 1, and 0 says that there was none.

    ``present`` counts engines that serve; ``why`` is the reason of a failure; ``seconds`` is how long it has taken.
    """

    number: int
    state: State
    wanted: Counts
    present: Counts
    engines: tuple[EngineStep, ...]
    seconds: float = 0.0
    why: str = ""


def parse_counts(given: Sequence[str]) -> Mapping[Role, int]:
    """``prefill=3 decode=5`` as numbers by role. Raises :class:`~tercet.protocol.BadRequest`."""
    found: dict[Role, int] = {}
    for each in given:
        role, _, count = each.partition("=")
        known: Role | None = next((name for name in ROLES if name == role), None)
        if known is None or not count.isdecimal() or len(count) > 4:
            raise BadRequest(f"COUNTS: {each!r} is not ROLE=NUMBER; ROLE is prefill, decode or both", "COUNTS")
        if known in found:
            raise BadRequest(f"COUNTS: {known} is there twice", "COUNTS")
        found[known] = int(count)
    return found
