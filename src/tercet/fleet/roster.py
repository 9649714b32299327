"""The members of a fleet by name, and the list of those that may be picked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tercet.fleet.knowledge import FleetKnowledge
from tercet.fleet.members import COUNTS, Member
from tercet.fleet.picking import Picking
from tercet.protocol import Conflict, UnknownEngine


class Roster:
    """A fleet's members; it updates the columns in ``knowledge`` and ``picking`` when a member changes.

    ``open`` are the members that may be picked now. The list changes in place, and then ``when_reopened`` is called.
    """

    def __init__(self, members: Sequence[Member], knowledge: FleetKnowledge, picking: Picking[Member]) -> None:
        self.open = list[Member]()
        self._members = {member.name: member for member in members}
        self._knowledge = knowledge
        self._picking = picking
        self.when_reopened: Callable[[], object] = lambda: None
        for member in members:
            self._follow(member)
        self.reopen()

    @property
    def members(self) -> Sequence[Member]:
        """All members, including drained ones."""
        return list(self._members.values())

    def get(self, name: str) -> Member | None:
        """Return the member of that name, or None."""
        return self._members.get(name)

    def member(self, name: str) -> Member:
        """Return the member of that name; raise :class:`~tercet.protocol.UnknownEngine` if there is none."""
        found = self._members.get(name)
        if found is None:
            known = ", ".join(self._members) or "none"
            raise UnknownEngine(f"name: this fleet has no engine {name!r}; it has {known}", "name")
        return found

    def add(self, member: Member) -> None:
        """Add a member, which may be picked at once; raise :class:`~tercet.protocol.Conflict` for a name in use."""
        if member.name in self._members:
            raise Conflict(f"name: this fleet already has an engine {member.name!r}; choose another name", "name")
        self._members[member.name] = member
        self._follow(member)
        self.reopen()

    def remove(self, name: str) -> Member:
        """Remove a member and the knowledge about it; raise :class:`~tercet.protocol.UnknownEngine` if unknown."""
        member = self.member(name)
        del self._members[name]
        member.on_change = None
        self._knowledge.remove(name)
        self.reopen()
        return member

    def drain(self, name: str, draining: bool = True) -> None:
        """Stop or resume picking a member; raise :class:`~tercet.protocol.UnknownEngine` if there is none."""
        self.member(name).draining = draining
        self.reopen()

    def reopen(self) -> None:
        """Compute again which members may be picked, after a member came, left or began to leave."""
        # In place: the views of a fleet share this list.
        self.open[:] = [member for member in self._members.values() if member.is_open]
        self._picking.reopen(self.open, [member for member in self._members.values() if not member.is_open])
        self.when_reopened()

    def _follow(self, member: Member) -> None:
        """Update the columns that picks use when the member changes."""
        self._knowledge.add(member.name)
        self._knowledge.loads.count(member.name, member.in_flight, member.in_flight_tokens)
        member.on_change = self._changed

    def _changed(self, member: Member, field: str) -> None:
        if field in COUNTS:
            self._knowledge.loads.count(member.name, member.in_flight, member.in_flight_tokens)
        else:
            self._picking.forget_candidates()
