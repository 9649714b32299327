"""Which engines of a fleet answer, fit and make progress, and what happens to calls to those that do not."""

from __future__ import annotations

from collections.abc import Callable

from tercet.fleet.knowledge import FleetKnowledge
from tercet.fleet.liveness import Liveness, Stuck
from tercet.fleet.members import Member
from tercet.fleet.picking import Picking
from tercet.fleet.roster import Roster
from tercet.protocol import EngineUnreachable, TercetError
from tercet.protocol.types import Paused
from tercet.settings import log_events

PAUSED: dict[Paused, str] = {"new": "new sequences", "all": "all sequences"}


class EngineHealth:
    """The health of the members of ``roster``; each change is logged once. ``clock`` is that of ``liveness``."""

    def __init__(
        self,
        roster: Roster,
        liveness: Liveness,
        knowledge: FleetKnowledge,
        picking: Picking[Member],
        clock: Callable[[], float],
    ) -> None:
        self._roster = roster
        self._liveness = liveness
        self._knowledge = knowledge
        self._picking = picking
        self._clock = clock
        self._lost: set[str] = set()

    # ---- what engines show ---------------------------------------------------------------------------------------

    def heard(self, name: str, stalled_s: float) -> None:
        """Record for how many seconds an engine has made no progress; an engine that is not a member is ignored."""
        if self._knowledge.loads.row(name) is not None:
            self._liveness.heard(name, self._clock(), stalled_s)

    def heard_within(self, name: str, seconds: float) -> bool:
        """Whether an engine has sent anything in the last ``seconds``."""
        return self._liveness.heard_within(name, seconds, self._clock())

    def note_stopping(self, name: str, stopping: bool) -> None:
        """Record whether an engine is stopping: then it is not picked."""
        member = self._roster.get(name)
        if member is not None and member.stopping is not stopping:
            member.stopping = stopping
            if stopping:
                log_events.ENGINE_STOPPING.tell(engine=name, reason="it is stopping")
            else:
                log_events.ENGINE_BACK.tell(engine=name, reason="it is no longer stopping")
            self._roster.reopen()

    def note_paused(self, name: str, paused: Paused) -> None:
        """Record what an engine has paused: then it is not picked.

        What waits for it fails, so that another engine takes it, as soon as there is one that may be picked. With none
        it waits on: the engine may be resumed.
        """
        member = self._roster.get(name)
        if member is None or not (paused or member.paused):
            return
        if member.paused != paused:
            member.paused = paused
            if paused:
                log_events.ENGINE_PAUSED.tell(engine=name, reason=f"it has paused {PAUSED[paused]}")
            else:
                log_events.ENGINE_BACK.tell(engine=name, reason="it was resumed")
            self._roster.reopen()
        if paused and self.answers:
            error = EngineUnreachable(f"{name} is paused")
            error.blames = name
            (member.calls.lose if paused == "all" else member.calls.lose_waiting)(error)

    def restarted(self, name: str) -> None:
        """Drop all knowledge of an engine: it was restarted."""
        log_events.ENGINE_RESTARTED.tell(engine=name, reason="it was restarted")
        self._knowledge.cleared(name)
        self.note_stopping(name, False)
        self.note_paused(name, "")

    def forget(self, name: str) -> None:
        """Forget an engine that was removed."""
        self._liveness.forget(name)
        self._lost.discard(name)

    # ---- lost and found ------------------------------------------------------------------------------------------

    def stand_still(self, interval: float) -> list[Stuck]:
        """Engines that are stuck now and were not ``interval`` seconds ago.

        Everything that waits for a stuck engine fails, even if it began to wait after that was found.
        """
        new = self._liveness.look(self._clock(), interval)
        for engine, why in self._liveness.stuck:
            self.lose(engine, why)
        return new

    def lose(self, name: str, why: str) -> None:
        """Fail everything that waits for a stuck engine, and do not pick it until it is reachable again."""
        member = self._roster.get(name)
        if member is not None:
            error = EngineUnreachable(f"{name} is stuck: {why}")
            error.blames = name
            self.lost(member, error)
            member.calls.lose(error)

    def lost(self, member: Member, error: TercetError) -> None:
        """Stop picking a lost engine until :meth:`found_well`; only the first error is logged."""
        member.reachable = False
        if member.name not in self._lost and member is self._roster.get(member.name):
            self._lost.add(member.name)
            log_events.ENGINE_LOST.tell(engine=member.name, code=error.code, reason=error.message)

    def refused(self, member: Member, error: TercetError) -> None:
        """Stop picking an engine that answers but does not fit, until :meth:`found_well`."""
        member.reachable = False
        self._lost.add(member.name)
        log_events.ENGINE_REFUSED.tell(engine=member.name, code=error.code, reason=error.message)

    def found_well(self, member: Member) -> None:
        """Pick an engine again: it answers, fits and makes progress."""
        member.reachable = True
        if member.name in self._lost:
            self._lost.discard(member.name)
            log_events.ENGINE_BACK.tell(engine=member.name, reason="it answers and makes progress")

    # ---- whether any answers -------------------------------------------------------------------------------------

    @property
    def answers(self) -> bool:
        """Whether at least one engine that may be picked answers."""
        return any(member.reachable for member in self._roster.open)

    def require_answers(self) -> None:
        """Raise :class:`~tercet.protocol.EngineUnreachable` if no engine that may be picked answers."""
        if not self._roster.open:
            raise self._picking.no_engine_error()
        if not self.answers:
            raise EngineUnreachable(self._why_none_answers())

    def _why_none_answers(self) -> str:
        members = self._roster.open
        refused = [member for member in members if member.refused]
        if not refused:
            return "no engine that may be picked answers"
        others = len(members) - len(refused)
        silent = f", and {others} of {len(members)} do not answer" if others else ""
        return (
            f"no engine serves what this router has promised its clients: {refused[0].name} answers, but "
            f"{refused[0].refused}{silent}. Put engines of this fleet's model there, or restart the router for "
            "the other model (with another state file, if it has one)"
        )
