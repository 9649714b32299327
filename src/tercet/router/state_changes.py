"""What is different from one state of a fleet to the next, as events of the log, each with its own reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from tercet.fleet.membership import MemberState
from tercet.router.fleet_state import FleetState, MadeChange, ProgramInUse
from tercet.settings import log_events as events
from tercet.settings.log_events import LogEvent

REMEMBERED = 32


class Change(NamedTuple):
    """An event, and its fields but for the reason."""

    event: LogEvent
    fields: dict[str, str | int]


def because(reason: str, before: FleetState, after: FleetState) -> FleetState:
    """``after``, which was made of ``before`` for that reason, if it is another state at all."""
    if after is before:
        return after
    made = [MadeChange(before.version + 1, each.event.name, each.fields, reason) for each in changes(before, after)]
    return msgspec.structs.replace(after, changes=(*before.changes, *made)[-REMEMBERED:])


def changes_with_reasons(before: FleetState, after: FleetState, otherwise: str) -> Sequence[tuple[Change, str]]:
    """What has been changed since ``before``, in order, and why: ``otherwise`` where nobody has said so.

    What was changed and changed back is in there twice.
    """
    made = [each for each in after.changes if each.version > before.version]
    told = [(Change(_CHANGES[each.event], each.fields), each.reason) for each in made if each.event in _CHANGES]
    known = [change for change, _ in told]
    return [*told, *((change, otherwise) for change in changes(before, after) if change not in known)]


def changes(before: FleetState, after: FleetState) -> Iterator[Change]:
    """What operators have changed between two states, each once; an engine at another URL is another engine."""
    known = {each.address.name: each for each in before.members}
    wanted = {each.address.name: each for each in after.members}
    here = {name: member for name, member in known.items() if name in wanted and _is_same(member, wanted[name])}
    for name in sorted(known.keys() - here.keys()):
        yield Change(events.ENGINE_REMOVED, {"engine": name})
    for name, member in wanted.items():
        yield from _of_member(here.get(name), member)
    yield from _of_programs(before.program, after)
    if after.scheduling is not None and after.scheduling != before.scheduling:
        yield Change(events.SCHEDULING_CHANGED, {"file": after.scheduling.file})


def _is_same(before: MemberState, after: MemberState) -> bool:
    return before.address.url == after.address.url


def _of_member(before: MemberState | None, after: MemberState) -> Iterator[Change]:
    address = after.address
    engine: dict[str, str | int] = {"engine": address.name}
    if before is None:
        yield Change(events.ENGINE_ADDED, {**engine, "url": address.url, "role": address.role})
    elif before.address.role != address.role:
        yield Change(events.ENGINE_ROLE, {**engine, "role": address.role, "before": before.address.role})
    if after.draining != (before is not None and before.draining):
        yield Change(events.ENGINE_DRAINED if after.draining else events.ENGINE_UNDRAINED, engine)


def _of_programs(before: ProgramInUse, after: FleetState) -> Iterator[Change]:
    """Every plan that has come since; the one before the last may have been in use for a moment only."""
    for used in (after.before, after.program):
        if used is not None and used.number > before.number:
            names = dict.fromkeys(arm.label for arm in used.plan.arms)
            yield Change(events.PROGRAM_CHANGED, {"version": used.number, "program": ", ".join(names)})


_CHANGES = {
    each.name: each
    for each in (
        events.ENGINE_ADDED, events.ENGINE_REMOVED, events.ENGINE_ROLE, events.ENGINE_DRAINED, events.ENGINE_UNDRAINED,
        events.PROGRAM_CHANGED, events.SCHEDULING_CHANGED,
    )
}  # fmt: skip
