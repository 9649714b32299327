"""The moves of this process's sequences: policies or people ask for them, limits hold them back, each is recorded.

Only the process that runs a sequence moves it (:class:`Moves`), one move at a time. Three ways ask for one:

1. :class:`Rescheduler` lets policies propose moves at intervals.
2. An admin route names a sequence of this process: :meth:`Moves.move`.
3. It names a sequence of another process of this fleet. Only the engine that generates the sequence knows that process,
   since it has the process's token stream: :func:`pass_on` hands the request to the engines, and :class:`Proposals`
   receives it at the other end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Literal, Protocol, runtime_checkable

import msgspec

from tercet.aio.tasks import TaskSet, repeat
from tercet.decisions.migration import (
    MovesUnderWay,
    Rescheduling,
    SequenceView,
    Stage,
    drain,
    failover,
    migrate,
    policies_of,
)
from tercet.fleet import EngineFleet, RunningSequence, RunningSequences
from tercet.fleet.fleet_view import TracedEngine
from tercet.fleet.members import UntilLost
from tercet.fleet.policy_views import counted_move, is_stale, loaded_engines
from tercet.fleet.sequences import MovingSequence
from tercet.logs import MOVE, lines_of_request
from tercet.protocol import (
    BadRequest,
    Conflict,
    DeadlineExceeded,
    EngineUnreachable,
    MoveProposal,
    TercetError,
    UnknownSequence,
)
from tercet.protocol.spans import TraceEvent, working_in
from tercet.router.observe.metrics import Metrics
from tercet.settings import MoveSettings, RescheduleSettings

REMEMBERED = 1000
# The code of a move that was cancelled.
UNWANTED = "unwanted"

Outcome = Literal["under_way", "moved", "ended", "failed", "dropped"]


class MoveRecord(msgspec.Struct):
    """The record of one move, from its start on. Times are in seconds; ``at`` is a Unix time.

    ``pause`` is the time between the last token from the source and the first from the destination; None if the client
    had no token before. ``stages`` are the stages whose KV arrived, also those of a failed move, and ``recomputed``
    counts the positions that no stage had sent. ``outcome`` is ``ended`` if the sequence ended first, ``failed`` if the
    sequence stays on its engine or continues as after any failure, and ``dropped`` if a proposed move could not begin;
    ``code`` is then that of the ``error``.
    """

    number: int
    seq_id: str
    source: str
    destination: str
    reason: str
    at: float
    tokens: int
    outcome: Outcome = "under_way"
    stages: tuple[Stage, ...] = ()
    recomputed: int = 0
    pause: float | None = None
    seconds: float = 0.0
    error: str = ""
    code: str = ""

    @property
    def bytes(self) -> int:
        return sum(stage.bytes for stage in self.stages)


class Moves:
    """The moves of this process, by ``settings``; ``under_way`` are the moves that have begun and not ended.

    ``observer`` is called when a move begins and when it has ended.
    """

    def __init__(self, fleet: EngineFleet, metrics: Metrics, settings: MoveSettings) -> None:
        self._fleet = fleet
        self.metrics = metrics
        self.settings = settings
        self.observer: Callable[[MoveRecord], object] | None = None
        self.under_way = MovesUnderWay(settings)
        # The sequences with a move under way; each has one move at a time.
        self.moving: set[RunningSequence] = set()
        self._record: deque[MoveRecord] = deque(maxlen=REMEMBERED)
        self._count = 0

    def since(self, number: int) -> Iterable[MoveRecord]:
        """Return the moves after ``number``, oldest first; only the last :data:`REMEMBERED` moves are kept."""
        return [move for move in self._record if move.number > number]

    def numbered(self, number: int) -> MoveRecord | None:
        """Return the move ``number``; None if it is no longer kept."""
        behind = self._count - number
        return self._record[-1 - behind] if 0 <= behind < len(self._record) else None

    def refusal(self, sequence: RunningSequence, destination: str) -> str | None:
        """Return the limit that a move would exceed now; None if it would exceed none."""
        generation = sequence.generation
        computed = generation.computed if generation is not None else 0
        return self.under_way.refusal(counted_move(self._fleet, sequence.engine, destination, computed))

    async def move(self, sequence: RunningSequence, destination: str, reason: str) -> MoveRecord:
        """Move a running sequence to another engine; return when that engine has generated an output.

        Raises :class:`~tercet.protocol.Conflict` for a sequence that no engine generates or that is being moved,
        :class:`~tercet.protocol.NoSpace` if a limit is reached, :class:`~tercet.protocol.UnknownEngine`,
        :class:`~tercet.protocol.EngineUnreachable`, :class:`~tercet.protocol.UnknownAdapter`,
        :class:`~tercet.protocol.LayoutMismatch` for engines that must not exchange KV,
        :class:`~tercet.protocol.BadRequest`, and the error of a stage that failed.
        After an error the sequence continues on its engine.
        """
        with lines_of_request(sequence.request_id), ExitStack() as counted:
            moving, to = self._admit(sequence, destination, counted)
            return await self._carry_out(sequence, moving, to, reason)

    async def follow(self, sequence: RunningSequence, destination: str, reason: str) -> None:
        """Move a sequence as :meth:`move` does, for a proposal: the result is only recorded.

        A move that cannot begin now is dropped, since the proposal would be out of date later.
        """
        with lines_of_request(sequence.request_id), ExitStack() as counted:
            try:
                moving, to = self._admit(sequence, destination, counted)
            except TercetError as error:
                move = self._recorded(sequence, sequence.engine, destination, reason, 0)
                move.outcome, move.error, move.code = "dropped", error.message, error.code
                self._over(move)
                return
            with suppress(TercetError):
                await self._carry_out(sequence, moving, to, reason)

    def _admit(
        self, sequence: RunningSequence, destination: str, counted: ExitStack
    ) -> tuple[MovingSequence, TracedEngine]:
        """Check a move; return the sequence and the destination. It counts for the limits until ``counted`` closes.

        Raises the errors of :meth:`move`.
        """
        if sequence in self.moving:
            raise Conflict(f"seq_id: another move of {sequence.request.seq_id} has not ended yet", "seq_id")
        moving = MovingSequence(sequence)
        source = moving.engine.name
        to = self._fleet.destination(moving.generation, destination)
        if destination == source:
            raise BadRequest(f"destination: {source} already generates {sequence.request.seq_id}", "destination")
        self._fleet.adapters.require(destination, sequence.request)
        if not self._fleet.member(destination).reachable:
            raise EngineUnreachable(f"destination: the engine {destination} does not answer now")
        self._fleet.require_exchange(source, destination)
        # Last, since other processes count it from here on.
        proposed = counted_move(self._fleet, source, destination, moving.computed)
        counted.enter_context(self.under_way.counted(proposed))
        return moving, to

    async def _carry_out(
        self, sequence: RunningSequence, moving: MovingSequence, to: TracedEngine, reason: str
    ) -> MoveRecord:
        move = self._recorded(sequence, moving.engine.name, to.name, reason, moving.computed)
        self.moving.add(sequence)
        call = moving.engine.called()
        stages: list[Stage] = []
        try:
            with self.metrics.moves_running.track_inprogress(), working_in(call.span):
                # Besides its deadline, the end of the sequence ends a move: its calls count among those that wait.
                async with asyncio.timeout(self.settings.deadline_s), UntilLost(sequence.waiting):
                    await migrate(moving, to, self.settings, stages, partial(self._share, moving.engine.name))
            sequence.moves += 1
            move.outcome, move.recomputed, move.pause = "moved", moving.recomputed, moving.pause
        except TimeoutError:
            move.outcome, move.error = "failed", f"the move took longer than {self.settings.deadline_s:g} s"
            move.code = DeadlineExceeded.code
            # The request itself is not late: it continues on its engine.
            raise Conflict(f"seq_id: {move.seq_id} was not moved: {move.error}", "seq_id") from None
        except TercetError as error:
            move.outcome, move.error = "ended" if sequence.ended else "failed", error.message
            move.code = error.code
            raise
        except BaseException:  # cancelled: a move ends with its sequence's task, or with the router
            move.outcome, move.error, move.code = "failed", "its client has left", UNWANTED
            raise
        finally:
            self.moving.discard(sequence)
            move.stages = tuple(stages)
            move.seconds = moving.engine.costs.clock() - call.started
            event = TraceEvent(
                "move", move.source, to=move.destination, end=move.tokens, computed=move.recomputed, bytes=move.bytes,
                number=move.number, reason=move.reason, outcome=move.outcome, pause=move.pause,
            )  # fmt: skip
            moving.engine.note(event, call)
            self._over(move)
        return move

    def _share(self, source: str) -> float:
        """Return the share of time (0 to 1) for which a move from ``source`` may send KV, by its last report."""
        last = self._fleet.knowledge.loads.last(source)
        return self.settings.share if last is None else self.settings.share_at(last[0].kv_usage, last[0].waiting)

    def _recorded(
        self, sequence: RunningSequence, source: str, destination: str, reason: str, tokens: int
    ) -> MoveRecord:
        self._count += 1
        seq_id = sequence.request.seq_id
        move = MoveRecord(self._count, seq_id, source, destination, reason, time.time(), tokens)
        self._record.append(move)
        if self.observer is not None:
            self.observer(move)
        return move

    def _over(self, move: MoveRecord) -> None:
        self.metrics.moved(move)
        if self.observer is not None:
            self.observer(move)
        sent = f"{len(move.stages)} stages, {move.bytes} bytes"
        pause = "" if move.pause is None else f", pause {move.pause * 1000:.0f} ms"
        if move.outcome == "moved":
            result = f"{sent}, {move.recomputed} tokens computed again{pause}"
        else:
            result = f"{move.error}; sent until then: {sent}" if move.stages else move.error
        MOVE.tell(
            seq_id=move.seq_id, engine=move.source, to=move.destination, reason=move.reason, outcome=move.outcome,
            code=move.code, result=result,
        )  # fmt: skip


class Rescheduler:
    """The mover of this process's ``sequences``: at intervals it begins the moves that policies propose, within limits.

    Policies see the load of the whole fleet, as engines report it, and the moves that the other processes with the same
    state have begun; limits count these too. Engines that are leaving, or have made no progress for ``stale_after_s``,
    are emptied with any settings. The constructor raises :class:`~tercet.protocol.BadRequest` if the settings name an
    unknown policy.
    """

    def __init__(
        self, fleet: EngineFleet, sequences: RunningSequences, moves: Moves, settings: RescheduleSettings
    ) -> None:
        self._fleet = fleet
        self._sequences = sequences
        self._moves = moves
        self._settings = settings
        self._rescheduling = Rescheduling((drain, failover, *policies_of(settings)))
        self._tasks = TaskSet()

    async def run(self) -> None:
        """Make a round (:meth:`look`) at each interval, until cancelled."""
        try:
            await repeat(self.look, self._settings.interval_s, "rescheduler")
        finally:
            await self._tasks.close()

    async def look(self) -> None:
        """Begin the moves that may begin now; a move that exceeds a limit is proposed again in the next round."""
        now, held_back = self._fleet.costs.clock(), 0
        self._rescheduling.begins(now)
        members = {member.name: member for member in self._fleet.members}
        # Without policies there is work only if an engine must be emptied, so idle rounds cost nothing.
        has_work = bool(self._settings.policies) or any(
            member.leaving or is_stale(self._fleet, member, self._settings.stale_after_s)
            for member in self._fleet.members
        )
        # What may be moved, by id, and what policies see of it, by engine. A sequence that is moving, or was moved less
        # than a pause ago, is left alone.
        movable: dict[str, RunningSequence] = {}
        views: dict[str, list[SequenceView]] = {name: [] for name in members}
        for sequence in self._sequences if has_work else ():
            seq_id, member = sequence.request.seq_id, members.get(sequence.engine)
            if not sequence.is_generated or member is None or sequence in self._moves.moving:
                continue
            if self._rescheduling.leaves_alone(seq_id):
                continue
            movable[seq_id], tokens = sequence, sequence.known_tokens
            view = SequenceView(seq_id, tokens, member.share(tokens), sequence.answered, now - sequence.began)
            views[member.name].append(view)
        under_way = self._moves.under_way.everywhere() if movable else []
        engines = loaded_engines(self._fleet, views, under_way, self._settings.stale_after_s) if movable else []
        for wanted in self._rescheduling.wanted(engines) if movable else ():
            sequence = movable.get(wanted.seq_id)
            if sequence is None or wanted.destination == wanted.source or wanted.destination not in members:
                continue
            if self._moves.refusal(sequence, wanted.destination) is not None:
                held_back += 1
                continue
            self._rescheduling.moved(wanted.seq_id, now)
            work = self._moves.follow(sequence, wanted.destination, wanted.reason)
            self._tasks.spawn(work, f"move of {wanted.seq_id}")
            await asyncio.sleep(0)  # so that the move begins and counts for the limits
        self._moves.metrics.held_back(held_back)


logger = logging.getLogger("tercet.router")
ANSWER_SECONDS = 5.0


@runtime_checkable
class PassesOn(Protocol):
    """An engine that passes proposals on; see :class:`~tercet.wire.client.HttpEngine` for the method."""

    async def propose_move(self, seq_id: str, destination: str, reason: str) -> None: ...


class Proposals:
    """The proposals that engines pass on to this process; ``moves`` executes them within the limits."""

    def __init__(self, sequences: RunningSequences, moves: Moves) -> None:
        self._sequences = sequences
        self._moves = moves
        self._tasks = TaskSet()

    def heard(self, engine: str, proposal: MoveProposal) -> None:
        """Start the proposed move of a sequence of ``engine``; drop it if the sequence has left that engine."""
        # A proposal may be late: the sequence may have moved, ended or failed while it was passed on.
        sequence = self._sequences.generated(engine, proposal.seq_id)
        if sequence is None:
            MOVE.tell(
                seq_id=proposal.seq_id, engine=engine, to=proposal.destination, reason=proposal.reason,
                outcome="dropped", code=UnknownSequence.code,
                result=f"{engine} no longer generates this sequence for this process",
            )  # fmt: skip
            return
        work = self._moves.follow(sequence, proposal.destination, proposal.reason)
        self._tasks.spawn(work, f"move of {proposal.seq_id}")


async def pass_on(fleet: EngineFleet, seq_id: str, destination: str, reason: str) -> None:
    """Pass a proposal to the engine that generates a sequence, which passes it on to the process that runs it.

    Raises :class:`~tercet.protocol.UnknownEngine` for the destination, :class:`~tercet.protocol.Conflict` if the
    sequence's tokens do not go to a router, and :class:`~tercet.protocol.UnknownSequence` if no engine has it.
    """
    fleet.member(destination)
    engines = [member.engine for member in fleet.members if not member.is_store]
    asked = {
        asyncio.ensure_future(engine.propose_move(seq_id, destination, reason))
        for engine in engines
        if isinstance(engine, PassesOn)
    }
    refusal: TercetError = UnknownSequence(f"seq_id: no sequence {seq_id!r} runs in this process or fleet", "seq_id")
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            for answer in asyncio.as_completed(asked):
                try:
                    return await answer
                except Conflict as error:
                    refusal = error
                except TercetError as error:
                    logger.debug("moves: an engine did not pass on the proposal for %s: %s", seq_id, error.message)
    except TimeoutError:  # an engine that does not answer may have the sequence, or not
        logger.warning("moves: %s: not every engine answered the proposal within %g s", seq_id, ANSWER_SECONDS)
    finally:
        for task in asked:
            task.cancel()
    raise refusal
