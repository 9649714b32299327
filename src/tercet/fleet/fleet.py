"""Engines by role, and the one way for a program to get one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from tercet.fleet.trace import Trace, TracedEngine
from tercet.protocol import BadRequest, Conflict, Engine, EngineUnreachable, UnknownEngine
from tercet.scheduling import PICKERS

Role = Literal["prefill", "decode", "both"]


@dataclass
class Member:
    """One engine of the fleet.

    ``in_flight`` counts the sequences that this front door runs on it now. ``reachable`` turns false when a call finds
    no answer, and true again when somebody (the front door's watch) gets one. A ``draining`` member is not picked any
    more. ``when_idle`` is called each time that its last sequence ends.
    """

    name: str
    url: str
    role: Role
    engine: Engine
    in_flight: int = 0
    reachable: bool = True
    draining: bool = False
    when_idle: Callable[[], None] | None = None

    def can(self, role: Role) -> bool:
        """Whether it may serve in ``role``; every engine can do both, roles are the router's."""
        return role == "both" or self.role in (role, "both")


class Fleet:
    """The engines that programs choose from.

    A fleet handed to a program is a view of the shared one: members and counts are shared, so that a change of
    membership is seen by programs that run already; the trace is the request's own.
    """

    def __init__(self, members: Sequence[Member], trace: Trace | None = None) -> None:
        self._members = list(members)
        self._open = [member for member in self._members if not member.draining]
        self._turns: Counter[tuple[str, str]] = Counter()
        self._trace = trace or Trace()

    @property
    def members(self) -> Sequence[Member]:
        """Every engine, those that are being drained included."""
        return self._members

    def traced(self, trace: Trace) -> Fleet:
        """A view of this fleet whose engines note in ``trace`` what they do."""
        view = Fleet((), trace)
        view._members, view._open, view._turns = self._members, self._open, self._turns
        return view

    def member(self, name: str) -> Member:
        """The engine of that name; raises :class:`~tercet.protocol.UnknownEngine`."""
        found = next((member for member in self._members if member.name == name), None)
        if found is None:
            known = ", ".join(member.name for member in self._members) or "none"
            raise UnknownEngine(f"name: this fleet has no engine {name!r}; it has {known}", "name")
        return found

    def add(self, member: Member) -> None:
        """From now on it may be picked; raises :class:`~tercet.protocol.Conflict` if its name is taken."""
        if any(other.name == member.name for other in self._members):
            raise Conflict(f"name: an engine called {member.name!r} is in this fleet already", "name")
        self._members.append(member)
        self._reopen()

    def remove(self, name: str) -> Member:
        """Forget an engine. Programs that hold it go on with it; ``in_flight`` of what is returned counts them.

        Raises :class:`~tercet.protocol.UnknownEngine`.
        """
        member = self.member(name)
        self._members.remove(member)
        self._reopen()
        return member

    def drain(self, name: str, draining: bool = True) -> Member:
        """No new picks of it, or picks again; what it runs goes on. Raises :class:`~tercet.protocol.UnknownEngine`."""
        member = self.member(name)
        member.draining = draining
        self._reopen()
        return member

    def set_role(self, name: str, role: Role) -> Member:
        """Picks from now on go by ``role``. Raises :class:`~tercet.protocol.UnknownEngine`."""
        member = self.member(name)
        member.role = role
        return member

    def _reopen(self) -> None:
        # In place: views hold the same list.
        self._open[:] = [member for member in self._members if not member.draining]

    @contextmanager
    def pick(self, role: Role = "both", by: str = "round_robin", other_than: Engine | None = None) -> Generator[Engine]:
        """An engine that may serve in ``role`` (``both`` means any), chosen by a picker; counted while entered.

        Engines that are being drained are left out; those that do not answer are while others do, and so is
        ``other_than``. Raises :class:`~tercet.protocol.EngineUnreachable` if no engine has the role, and
        :class:`~tercet.protocol.BadRequest` for an unknown picker.
        """
        member = self._choose(role, by, other_than.name if other_than is not None else None)
        member.in_flight += 1
        try:
            yield TracedEngine(member.engine, self._trace, lambda: setattr(member, "reachable", False))
        finally:
            member.in_flight -= 1
            if member.in_flight == 0 and member.when_idle is not None:
                member.when_idle()

    def _choose(self, role: Role, by: str, without: str | None) -> Member:
        picker = PICKERS.get(by)
        if picker is None:
            raise BadRequest(f"pick: there is no picker {by!r}; choose one of {', '.join(sorted(PICKERS))}", "pick")
        # Written for fleets of thousands: a pass over all members costs more than everything else in a pick.
        able = self._open if role == "both" else [m for m in self._open if m.role == role or m.role == "both"]
        candidates = [member for member in able if member.reachable] or able
        if without is not None:
            candidates = [member for member in candidates if member.name != without] or candidates
        if not candidates:
            raise EngineUnreachable(f"no engine of this fleet has the role {role}")
        key = (role, by)
        turn = self._turns[key]
        self._turns[key] += 1
        return candidates[picker(candidates, turn)]
