"""Differences between two lists of a fleet's members, as log events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tercet.fleet.member_state import MemberState
from tercet.settings import log_events as events
from tercet.settings.log_events import LogEvent


class Change(NamedTuple):
    """A log event and its fields except the reason; ``reason`` is empty if the caller gives one."""

    event: LogEvent
    fields: dict[str, str | int]
    reason: str = ""


def member_changes(before: Sequence[MemberState], after: Sequence[MemberState]) -> Iterator[Change]:
    """Yield each change from ``before`` to ``after`` once; an engine at another URL is another engine."""
    known = {each.address.name: each for each in before}
    wanted = {each.address.name: each for each in after}
    here = {name: member for name, member in known.items() if name in wanted and _is_same(member, wanted[name])}
    for name in sorted(known.keys() - here.keys()):
        yield Change(events.ENGINE_REMOVED, {"engine": name})
    for name, member in wanted.items():
        yield from _of_member(here.get(name), member)


def _is_same(before: MemberState, after: MemberState) -> bool:
    return before.address.url == after.address.url


def _of_member(before: MemberState | None, after: MemberState) -> Iterator[Change]:
    address = after.address
    engine: dict[str, str | int] = {"engine": address.name}
    if before is None:
        yield Change(events.ENGINE_ADDED, {**engine, "url": address.url, "role": address.role})
    elif before.address.role != address.role:
        yield Change(events.ENGINE_ROLE, {**engine, "role": address.role, "before": before.address.role})
    if after.leaving != (before is not None and before.leaving):
        yield Change(events.ENGINE_DRAINED if after.leaving else events.ENGINE_UNDRAINED, engine, after.withheld)
