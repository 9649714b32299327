"""Engines by role, and the one way for a program to get one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from tercet.fleet.trace import Trace, TracedEngine
from tercet.protocol import BadRequest, Engine, EngineUnreachable
from tercet.scheduling import PICKERS

Role = Literal["prefill", "decode", "both"]


@dataclass
class Member:
    """One engine of the fleet.

    ``in_flight`` counts the sequences that this front door runs on it now. ``reachable`` turns false when a call finds
    no answer, and true again when somebody (the front door's watch) gets one.
    """

    name: str
    url: str
    role: Role
    engine: Engine
    in_flight: int = 0
    reachable: bool = True

    def can(self, role: Role) -> bool:
        """Whether it may serve in ``role``; every engine can do both, roles are the router's."""
        return role == "both" or self.role in (role, "both")


class Fleet:
    """The engines that programs choose from.

    A fleet handed to a program is a view of the shared one: the counts are shared, the trace is the request's own.
    """

    def __init__(self, members: Sequence[Member], trace: Trace | None = None) -> None:
        self._members = members
        self._turns: Counter[tuple[str, str]] = Counter()
        self._trace = trace or Trace()

    @property
    def members(self) -> Sequence[Member]:
        """Every engine."""
        return self._members

    def traced(self, trace: Trace) -> Fleet:
        """A view of this fleet whose engines note in ``trace`` what they do."""
        view = Fleet(self._members, trace)
        view._turns = self._turns
        return view

    @contextmanager
    def pick(self, role: Role = "both", by: str = "round_robin", other_than: Engine | None = None) -> Generator[Engine]:
        """An engine that may serve in ``role`` (``both`` means any), chosen by a picker; counted while entered.

        Engines that do not answer are left out while others do, and so is ``other_than``. Raises
        :class:`~tercet.protocol.EngineUnreachable` if no engine has the role, and
        :class:`~tercet.protocol.BadRequest` for an unknown picker.
        """
        member = self._choose(role, by, other_than.name if other_than is not None else None)
        member.in_flight += 1
        try:
            yield TracedEngine(member.engine, self._trace, lambda: setattr(member, "reachable", False))
        finally:
            member.in_flight -= 1

    def _choose(self, role: Role, by: str, without: str | None) -> Member:
        picker = PICKERS.get(by)
        if picker is None:
            raise BadRequest(f"pick: there is no picker {by!r}; choose one of {', '.join(sorted(PICKERS))}", "pick")
        # Written for fleets of thousands: a pass over all members costs more than everything else in a pick.
        able = self._members if role == "both" else [m for m in self._members if m.role == role or m.role == "both"]
        candidates = [member for member in able if member.reachable] or able
        if without is not None:
            candidates = [member for member in candidates if member.name != without] or candidates
        if not candidates:
            raise EngineUnreachable(f"no engine of this fleet has the role {role}")
        key = (role, by)
        turn = self._turns[key]
        self._turns[key] += 1
        return candidates[picker(candidates, turn)]
