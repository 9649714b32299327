"""The members of a fleet by name, and which of them may be picked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tercet.fleet.knowledge import FleetKnowledge
from tercet.fleet.members import COUNTS, Member
from tercet.fleet.picking import Picking
from tercet.protocol import Conflict, UnknownEngine


class Roster:
    """A fleet's members. What picks use of a member, in ``knowledge`` and ``picking``, follows its changes.

    ``open`` are the members that may be picked now; the list changes in place, and then ``when_reopened`` is called.
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
        """All members, including those that are being drained."""
        return list(self._members.values())

    def get(self, name: str) -> Member | None:
        """The member of that name, if there is one."""
        return self._members.get(name)

    def member(self, name: str) -> Member:
        """The member of that name; raises :class:`~tercet.protocol.UnknownEngine`."""
        found = self._members.get(name)
        if found is None:
            known = ", ".join(self._members) or "none"
            raise UnknownEngine(f"name: this fleet has no engine {name!r}; it has {known}", "name")
        return found

    def add(self, member: Member) -> None:
        """Add a member, which may be picked at once; raises :class:`~tercet.protocol.Conflict` for a name in use."""
        if member.name in self._members:
            raise Conflict(f"name: an engine called {member.name!r} is in this fleet already", "name")
        self._members[member.name] = member
        self._follow(member)
        self.reopen()

    def remove(self, name: str) -> Member:
        """Remove a member, and what is known of it; raises :class:`~tercet.protocol.UnknownEngine`."""
        member = self.member(name)
        del self._members[name]
        member.on_change = None
        self._knowledge.remove(name)
        self.reopen()
        return member

    def drain(self, name: str, draining: bool = True) -> None:
        """Stop or resume picking a member. Raises :class:`~tercet.protocol.UnknownEngine`."""
        self.member(name).draining = draining
        self.reopen()

    def reopen(self) -> None:
        """Find again which members may be picked: one came, left, or is leaving."""
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
