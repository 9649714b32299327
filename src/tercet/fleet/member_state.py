"""An engine of a fleet as state that routers store and share, and the differences between two such lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from tercet import logs as events
from tercet.logs import LogEvent
from tercet.protocol.names import require_uid
from tercet.settings import EngineAddress

JOINED = "joined:"
"""Prefix of the uid of an engine that has joined by itself."""


class MemberState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine of a fleet, and whether it may be picked.

    ``draining`` is set by its operator. ``uid`` is that of the pod or roster entry as which the engine was found, or of
    the start that joined by itself; empty for an engine that was named in settings. ``withheld`` is the reason why it
    gets no new requests, or empty.
    """

    address: EngineAddress
    draining: bool = False
    uid: str = msgspec.field(default="", name="pod")
    withheld: str = ""

    def __post_init__(self) -> None:
        if self.uid:
            require_uid(self.uid)

    @property
    def leaving(self) -> bool:
        """True if the engine gets no new requests and its sequences should move to other engines."""
        return self.draining or bool(self.withheld)

    @property
    def joined(self) -> bool:
        """True if the engine joined by itself, and leaves by itself."""
        return self.uid.startswith(JOINED)


class Change(NamedTuple):
    """A log event and its fields except the reason; ``reason`` is empty if the caller gives one."""

    event: LogEvent
    fields: dict[str, str | int]
    reason: str = ""


def member_changes(before: Sequence[MemberState], after: Sequence[MemberState]) -> Iterator[Change]:
    """Yield each change from ``before`` to ``after`` once; an engine at another URL is another engine."""
    known = {each.address.name: each for each in before}
    wanted = {each.address.name: each for each in after}
    here = {
        name: member
        for name, member in known.items()
        if name in wanted and member.address.url == wanted[name].address.url
    }
    for name in sorted(known.keys() - here.keys()):
        yield Change(events.ENGINE_REMOVED, {"engine": name})
    for name, member in wanted.items():
        yield from _of_member(here.get(name), member)


def _of_member(before: MemberState | None, after: MemberState) -> Iterator[Change]:
    address = after.address
    engine: dict[str, str | int] = {"engine": address.name}
    if before is None:
        yield Change(events.ENGINE_ADDED, {**engine, "url": address.url, "role": address.role})
    elif before.address.role != address.role:
        yield Change(events.ENGINE_ROLE, {**engine, "role": address.role, "before": before.address.role})
    if after.leaving != (before is not None and before.leaving):
        yield Change(events.ENGINE_DRAINED if after.leaving else events.ENGINE_UNDRAINED, engine, after.withheld)
