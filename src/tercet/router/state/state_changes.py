"""The differences between two states of a fleet, as log events with their reasons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from tercet.fleet.member_state import Change, member_changes
from tercet.router.state.fleet_state import FleetState, MadeChange, ProgramInUse
from tercet.settings import log_events as events

REMEMBERED = 32
# The reason of a change that a caller asks for without a reason.
ASKED = "requested"


def because(reason: str, before: FleetState, after: FleetState) -> FleetState:
    """Return ``after``, with its changes since ``before`` and their ``reason`` recorded if the two states differ."""
    if after is before:
        return after
    version, found = before.version + 1, changes(before, after)
    made = [MadeChange(version, each.event.name, each.fields, each.reason or reason) for each in found]
    return msgspec.structs.replace(after, changes=(*before.changes, *made)[-REMEMBERED:])


def changes_with_reasons(before: FleetState, after: FleetState, otherwise: str) -> Sequence[tuple[Change, str]]:
    """Return the changes since ``before`` in order, each with its reason, or ``otherwise`` if none was recorded.

    A setting that was changed and changed back occurs twice.
    """
    made = [each for each in after.changes if each.version > before.version]
    told = [(Change(_CHANGES[each.event], each.fields), each.reason) for each in made if each.event in _CHANGES]
    known = [change for change, _ in told]
    untold = (each for each in changes(before, after) if each._replace(reason="") not in known)
    return [*told, *((each, each.reason or otherwise) for each in untold)]


def changes(before: FleetState, after: FleetState) -> Iterator[Change]:
    """Yield each difference between two states once; an engine at another URL is another engine."""
    yield from member_changes(before.members, after.members)
    yield from _of_adapters(before, after)
    yield from _of_programs(before.program, after)
    if after.scheduling is not None and after.scheduling != before.scheduling:
        yield Change(events.SCHEDULING_CHANGED, {"file": after.scheduling.file})


def _of_adapters(before: FleetState, after: FleetState) -> Iterator[Change]:
    known, wanted = ({each.name: each for each in state.adapters} for state in (before, after))
    for name in known.keys() - wanted.keys():
        yield Change(events.ADAPTER_UNLOADED, {"adapter": name})
    for name, adapter in wanted.items():
        if known.get(name) != adapter:
            yield Change(events.ADAPTER_LOADED, {"adapter": name, "path": adapter.path})


def _of_programs(before: ProgramInUse, after: FleetState) -> Iterator[Change]:
    """Yield every plan since ``before``, also one that was in use only for a moment."""
    for used in (after.before, after.program):
        if used is not None and used.number > before.number:
            names = dict.fromkeys(arm.label for arm in used.plan.arms)
            yield Change(events.PROGRAM_CHANGED, {"version": used.number, "program": ", ".join(names)})


_CHANGES = {
    each.name: each
    for each in (
        events.ENGINE_ADDED, events.ENGINE_REMOVED, events.ENGINE_ROLE, events.ENGINE_DRAINED, events.ENGINE_UNDRAINED,
        events.ADAPTER_LOADED, events.ADAPTER_UNLOADED, events.PROGRAM_CHANGED, events.SCHEDULING_CHANGED,
    )
}  # fmt: skip
