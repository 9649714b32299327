"""The health of a fleet's engines: whether they answer, fit and make progress; calls to the others fail.

An engine is alive if it makes progress; an open connection is not enough. It reports for how many seconds its processes
have made no progress (``EngineLoad.stalled_s``). An engine that sends nothing counts as one without progress.
:class:`Liveness` decides which engines are stuck; :class:`EngineHealth` acts on that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tercet import logs
from tercet.fleet.knowledge import FleetKnowledge
from tercet.fleet.members import Member, Roster
from tercet.fleet.picking import Picking
from tercet.protocol import EngineUnreachable, TercetError
from tercet.protocol.types import Paused

STUCK_AFTER_S = 5.0
PAUSED: dict[Paused, str] = {"new": "new sequences", "all": "all sequences"}


class Stuck(NamedTuple):
    """A stuck engine, and the reason."""

    engine: str
    why: str


class Liveness:
    """State machine, without I/O, that decides which engines are stuck. Times are seconds of one monotonic clock.

    An engine is stuck when it has made no progress for ``stuck_after_s``, which must be longer than its longest step.
    Time in which :meth:`look` was not called does not count, because this process itself was stopped.
    """

    def __init__(self, stuck_after_s: float) -> None:
        self.stuck_after_s = stuck_after_s
        # By engine. One that hung up closed its connection: what was heard before no longer shows that it is alive.
        self._progressed_at: dict[str, float] = {}
        self._heard_at: dict[str, float] = {}
        self._stuck: set[str] = set()
        self._hung_up: set[str] = set()
        self._looked_at: float | None = None

    def heard(self, engine: str, now: float, stalled_s: float = 0.0) -> None:
        """Record a report: the engine's last progress was ``stalled_s`` seconds ago."""
        self._heard_at[engine] = now
        self._hung_up.discard(engine)
        progressed_at = self._progressed_at.get(engine, now)
        # Reports may overtake each other: progress never moves back.
        self._progressed_at[engine] = max(progressed_at, now - stalled_s)
        if now - self._progressed_at[engine] <= self.stuck_after_s:
            self._stuck.discard(engine)

    def hung_up(self, engine: str) -> None:
        self._hung_up.add(engine)

    def forget(self, engine: str) -> None:
        self._heard_at.pop(engine, None)
        self._progressed_at.pop(engine, None)
        self._stuck.discard(engine)
        self._hung_up.discard(engine)

    @property
    def stuck(self) -> list[Stuck]:
        now = self._looked_at or 0.0
        return [Stuck(engine, self._why(engine, now)) for engine in sorted(self._stuck)]

    def is_stuck(self, engine: str) -> bool:
        return engine in self._stuck

    def progressed_since(self, engine: str, then: float) -> bool:
        """True if the engine's last known progress is not before the time ``then``, or if none is known."""
        return self._progressed_at.get(engine, then) >= then

    def stalled_s(self, engine: str) -> float:
        """Return the seconds without progress of an engine at the last check; 0 before the first check."""
        if self._looked_at is None:
            return 0.0
        return max(0.0, self._looked_at - self._progressed_at.get(engine, self._looked_at))

    def heard_within(self, engine: str, seconds: float, now: float) -> bool:
        return engine not in self._hung_up and now - self._heard_at.get(engine, -float("inf")) <= seconds

    def look(self, now: float, interval: float) -> list[Stuck]:
        """Check all engines, ``interval`` seconds after the last check; return those that are stuck only since then."""
        slept = 0.0 if self._looked_at is None else now - self._looked_at - interval
        self._looked_at = now
        # This process was stopped, or its machine slept: engines could not be heard in that time, so it does not count
        # against them.
        if slept > interval:
            for times in (self._progressed_at, self._heard_at):
                times.update({engine: at + slept for engine, at in times.items()})
        standing = [engine for engine, at in self._progressed_at.items() if now - at > self.stuck_after_s]
        new = [Stuck(engine, self._why(engine, now)) for engine in standing if engine not in self._stuck]
        self._stuck.update(standing)
        return new

    def _why(self, engine: str, now: float) -> str:
        silence = now - self._heard_at[engine]
        if silence > self.stuck_after_s / 2:
            return f"the engine has sent no message for {silence:.1f} s"
        return f"the engine answers, but has made no progress for {now - self._progressed_at[engine]:.1f} s"


class EngineHealth:
    """The health of the members of ``roster``; each change is logged once. ``clock`` is that of ``liveness``."""

    def __init__(
        self, roster: Roster, liveness: Liveness, knowledge: FleetKnowledge, picking: Picking[Member],
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._roster = roster
        self._liveness = liveness
        self._knowledge = knowledge
        self._picking = picking
        self._clock = clock
        self._lost: set[str] = set()

    # ---- reports -------------------------------------------------------------------------------------------------

    def heard(self, name: str, stalled_s: float) -> None:
        """Record for how many seconds an engine has made no progress; an engine that is not a member is ignored."""
        if self._knowledge.loads.row(name) is not None:
            self._liveness.heard(name, self._clock(), stalled_s)

    def heard_within(self, name: str, seconds: float) -> bool:
        return self._liveness.heard_within(name, seconds, self._clock())

    def note_stopping(self, member: Member, stopping: bool) -> None:
        """Record whether an engine is stopping; a stopping engine is not picked."""
        if member.stopping is not stopping:
            member.stopping = stopping
            if stopping:
                logs.ENGINE_STOPPING.tell(engine=member.name, reason="the engine reports that it is stopping")
            else:
                logs.ENGINE_BACK.tell(engine=member.name, reason="the engine is no longer stopping")
            self._roster.reopen()

    def note_paused(self, member: Member, paused: Paused) -> None:
        """Record whether an engine has paused, and for which sequences; a paused engine is not picked.

        Calls that wait for it fail, so that another engine serves them, as soon as another engine may be picked. Until
        then they wait on: the paused engine may be resumed.
        """
        if member.paused != paused:
            member.paused = paused
            if paused:
                logs.ENGINE_PAUSED.tell(engine=member.name, reason=f"it has paused {PAUSED[paused]}")
            else:
                logs.ENGINE_BACK.tell(engine=member.name, reason="it was resumed")
            self._roster.reopen()
        if paused and self.answers:
            error = EngineUnreachable(f"{member.name} is paused")
            error.blames = member.name
            member.calls.lose(error, only_waiting=paused != "all")

    def restarted(self, name: str) -> None:
        logs.ENGINE_RESTARTED.tell(engine=name, reason="it was restarted")
        # Its KV is gone with the process: a pick must not expect cached tokens there.
        self._knowledge.cleared(name)
        member = self._roster.get(name)
        if member is not None:
            self.note_stopping(member, False)
            self.note_paused(member, "")
            self._roster.when_started(member)

    def forget(self, name: str) -> None:
        self._liveness.forget(name)
        self._lost.discard(name)

    # ---- lost and found ------------------------------------------------------------------------------------------

    def stand_still(self, interval: float) -> list[Stuck]:
        """Check for stuck engines; return those that were not stuck ``interval`` seconds ago.

        Every call that waits for a stuck engine fails, even one that began after the engine was found stuck.
        """
        new = self._liveness.look(self._clock(), interval)
        # All that are stuck, not only the new ones: calls that began since then wait, too.
        for engine, why in self._liveness.stuck:
            self.lose(engine, why)
        return new

    def lose(self, name: str, why: str) -> None:
        """Fail every call that waits for a stuck engine, and stop picking it until it is reachable again."""
        member = self._roster.get(name)
        if member is not None:
            error = EngineUnreachable(f"{name} is stuck: {why}")
            error.blames = name
            # First it is no longer picked: a call that fails now is retried at once, and must not come back here.
            self.lost(member, error)
            member.calls.lose(error)

    def lost(self, member: Member, error: TercetError) -> None:
        """Stop picking a lost engine until :meth:`found_well`; only the first error is logged."""
        member.reachable = False
        # Not for a member that was removed meanwhile: its name may be that of another engine now.
        if member.name not in self._lost and member is self._roster.get(member.name):
            self._lost.add(member.name)
            logs.ENGINE_LOST.tell(engine=member.name, code=error.code, reason=error.message)

    def refused(self, member: Member, error: TercetError) -> None:
        """Stop picking an engine that answers but does not fit, until :meth:`found_well`."""
        member.reachable = False
        self._lost.add(member.name)
        logs.ENGINE_REFUSED.tell(engine=member.name, code=error.code, reason=error.message)

    def found_well(self, member: Member) -> None:
        """Pick an engine again: it answers, fits and makes progress."""
        member.reachable = True
        if member.name in self._lost:
            self._lost.discard(member.name)
            logs.ENGINE_BACK.tell(engine=member.name, reason="it answers and makes progress")

    # ---- engines that answer -------------------------------------------------------------------------------------

    @property
    def answers(self) -> bool:
        return any(member.reachable for member in self._roster.open)

    def require_answers(self) -> None:
        """Raise :class:`~tercet.protocol.EngineUnreachable` if no engine that may be picked answers."""
        if not self._roster.open:
            raise self._picking.no_engine_error()
        if self.answers:
            return
        members = self._roster.open
        refused = [member for member in members if member.refused]
        if not refused:
            raise EngineUnreachable("no engine that may be picked answers")
        others = len(members) - len(refused)
        silent = f", and {others} of {len(members)} do not answer" if others else ""
        raise EngineUnreachable(
            f"no engine serves the model that this router announced to its clients: {refused[0].name} answers, but "
            f"{refused[0].refused}{silent}. Start engines with this fleet's model at these addresses, or restart the "
            "router for the other model (with another state file, if it has one)"
        )
