"""Sessions: execution of the decisions of ``decisions.sessions.SessionTable``, by leases that pin KV and by moves."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Literal

import msgspec

from tercet.aio.files import FileThread, read_whole, write_whole
from tercet.aio.tasks import TaskSet, keep_running
from tercet.decisions.sessions import Action, Context, EngineSeen, Keep, MoveContext, Pause, SessionTable, session_named
from tercet.fleet import EngineFleet, FleetView, RunningSequence, Trace
from tercet.logs import SESSION_MOVE
from tercet.programs import migrate_context
from tercet.protocol import Request, Role, TercetError
from tercet.protocol.headers import SESSION_FINAL_HEADER
from tercet.protocol.wire import UNREADABLE
from tercet.router.observe.metrics import SessionMetrics
from tercet.settings.fleet_settings import SessionSettings

logger = logging.getLogger("tercet.router")
LOOK_INTERVAL_S = 0.25
# Shortest time between two writes of the sessions' engines to their file.
WRITE_INTERVAL_S = 1.0
# Seconds between renewals of a pin, which must be less than the timeout of an engine's lease.
RENEWAL_INTERVAL_S = 15.0
MOVE_DEADLINE_S = 30.0
# Seconds that a turn waits for its context to arrive; after that the engine computes it.
ARRIVAL_DEADLINE_S = 5.0

# The place of a turn: ``first`` turn of its session, on the engine that the session is bound to, or on another.
Ran = Literal["first", "bound", "other"]
MoveEnd = Literal["moved", "absent", "failed"]
PinEnd = Literal["given_up", "refused", "lost"]


class LiveEngines(Mapping[str, EngineSeen]):
    """The present state of the fleet's engines, by name."""

    def __init__(self, fleet: EngineFleet) -> None:
        self._fleet = fleet
        self._members = {member.name: member for member in fleet.members if not member.is_store}

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, name: str) -> EngineSeen:
        member, last = self._members[name], self._fleet.knowledge.loads.last(name)
        load = None if last is None else last[0]
        return EngineSeen(
            member.name, member.is_open and member.reachable, member.can("decode"), member.leaving, member.kv_tokens,
            0.0 if load is None else load.kv_usage, 0 if load is None else load.waiting,
            member.revision,
        )  # fmt: skip


class Sessions:
    """The sessions of this router process; ``table`` decides, and picks of ``fleet`` use it.

    ``name`` is the prefix of the ids of leases and sends, which must differ from those of other processes. ``file``
    keeps the engine of each session for the next start of this process.
    """

    def __init__(
        self, fleet: EngineFleet, settings: SessionSettings, metrics: SessionMetrics, name: str | None = None,
        file: Path | None = None,
    ) -> None:  # fmt: skip
        self.table = fleet.picking.sessions = SessionTable(settings)
        self._kept = None if file is None else _KeptBindings(file, self.table, fleet.costs.clock())
        self._fleet = fleet
        self._metrics = metrics
        self._name = name or f"session-{uuid.uuid4().hex[:12]}"
        self._clock = fleet.costs.clock
        self._ids = 0
        self._tasks = TaskSet()
        self._pins: dict[Context, asyncio.Event] = {}
        self._moves: dict[Context, asyncio.Task[None]] = {}
        self._holds: dict[str, asyncio.Event] = {}
        self._belonged: dict[str, str | None] = {}
        self._answered: dict[str, bool] = {}
        self._wake = asyncio.Event()
        fleet.when_reopened.append(self._wake.set)

    async def run(self) -> None:
        """Check the engines at intervals, and at once when an engine begins to leave, until cancelled."""
        try:
            await keep_running(self._watch, "sessions")
        finally:
            if self._kept is not None:
                self._kept.close()
            await self._tasks.close()

    async def _watch(self) -> None:
        while True:
            self._wake.clear()
            self._look()
            if self._kept is not None:
                self._kept.look(self._clock())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_INTERVAL_S)

    # ---- turns ---------------------------------------------------------------------------------------------------

    async def begins(self, request: Request) -> None:
        """Begin the turn of a request with a session; wait a limited time for moves of its context to end."""
        session = session_named(request)
        if session is None:
            return
        actions, pause = self.table.begins(session, self._clock())
        self._belonged[request.seq_id] = self.table.engine_of(session, "decode")
        self._act(actions)
        if pause is not None:
            self._metrics.paused(*pause)
        engines = LiveEngines(self._fleet)
        if any(member.leaving for member in self._fleet.members):
            self._act(self.table.arrives(session, request, engines))
        # A turn that overtook its context would compute it again; one that waited for ever would be worse.
        if moves := [self._moves[context] for context in self.table.moving(session) if context in self._moves]:
            await asyncio.wait(moves, timeout=ARRIVAL_DEADLINE_S)
            self._belonged[request.seq_id] = self.table.engine_of(session, "decode")

    def ends(self, sequence: RunningSequence) -> None:
        request = sequence.request
        session = session_named(request)
        if session is None or request.seq_id not in self._belonged:
            return
        engine, belonged = sequence.engine if sequence.tokens else "", self._belonged.pop(request.seq_id)
        if engine:
            self._metrics.turn("first" if belonged is None else "bound" if engine == belonged else "other")
        self._act(self.table.ends(session, request, sequence.tokens, engine, self._clock()))
        # After the turn was recorded: its context is part of what is forgotten.
        if request.headers.get(SESSION_FINAL_HEADER, "").strip().lower() == "true":
            self._act(self.table.over(session))
        if (calls_tool := self._answered.pop(request.seq_id, None)) is not None:
            self.answered(request, calls_tool=calls_tool)

    def answered(self, request: Request, *, calls_tool: bool) -> None:
        """Record that the client has the answer of a turn; ``calls_tool``: its next turn brings a tool's result."""
        session = session_named(request)
        if session is not None and request.seq_id in self._belonged:
            self._answered[request.seq_id] = calls_tool  # the turn itself has not ended yet
        elif session is not None:
            pause: Pause = "tool" if calls_tool else "client"
            self._act(self.table.pauses(session, pause, LiveEngines(self._fleet), self._clock()))

    # ---- execution of decisions ----------------------------------------------------------------------------------

    def _look(self) -> None:
        if not (self.table or self._pins or self._holds):
            self._metrics.sizes(0, 0)
            return
        engines = LiveEngines(self._fleet)
        self._act(self.table.look(engines, self._clock()))
        self._metrics.sizes(len(self.table), self.table.kept)
        # As long as contexts leave an engine, a hold keeps it from ending under them.
        emptied = {context.engine for context in self._moves}
        for engine in emptied - self._holds.keys():
            self._holds[engine] = over = asyncio.Event()
            self._tasks.spawn(self._hold(engine, over), f"hold of {engine}")
        for engine in self._holds.keys() - emptied:
            self._holds.pop(engine).set()

    def _act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            context = action.context
            # The table decides without I/O; here a decision becomes a task, or the end of one.
            if isinstance(action, Keep):
                over = self._pins[context] = asyncio.Event()
                self._tasks.spawn(self._pin(context, over), f"pin of {context.session}")
            elif isinstance(action, MoveContext):
                move = self._tasks.spawn(self._move(context, action.to), f"move of session {context.session}")
                self._moves[context] = move
                self._wake.set()
            elif context in self._pins:
                self._pins.pop(context).set()

    async def _pin(self, context: Context, over: asyncio.Event) -> None:
        """Hold a lease of the context's blocks, so that the engine does not evict them, until ``over`` is set."""
        end: PinEnd = "given_up"
        request = context.request(self._next_id())
        try:
            engine = self._fleet.member(context.engine).engine
            async with engine.prep_recv(request) as space:
                if 2 * space.matched_len < context.num_tokens:  # most of it is gone from the cache
                    end = "refused"
                    return
                self.table.kept_since(context, self._clock())
                while not over.is_set():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(over.wait(), RENEWAL_INTERVAL_S)
                        break
                    # To the same end: it takes no more blocks, and the engine counts the lease's time from now.
                    await engine.extend_recv(space, request)
        except TercetError as error:
            end = "refused" if error.code == "no_space" else "lost"
        finally:
            # Otherwise the context was given up, and kept again: that pin is not this one's to end.
            if self._pins.get(context) is over:
                del self._pins[context]
                self.table.not_kept(context)
            self._metrics.unpinned(end)

    async def _move(self, context: Context, to: str) -> None:
        source, end, sent, reason = context.engine, "failed", 0, f"the move took longer than {MOVE_DEADLINE_S:g} s"
        try:
            async with asyncio.timeout(MOVE_DEADLINE_S):
                copied = await self._copied(context, to)
            end, sent, reason = ("absent", 0, "the cache has none of it") if copied is None else ("moved", *copied)
        except TercetError as error:
            reason = error.message
        except TimeoutError:
            pass
        finally:
            del self._moves[context]
            self._act(self.table.moved(context, LiveEngines(self._fleet), done=end == "moved"))
            self._wake.set()
        self._metrics.moved(end, sent)
        SESSION_MOVE.tell(session=context.session, engine=source, to=to, outcome=end, reason=reason)

    async def _copied(self, context: Context, to: str) -> tuple[int, str] | None:
        """Copy the context's KV that its engine has cached; return the bytes and a text, or None if it has none.

        The KV is pinned meanwhile. The source computes nothing: the engine of the next turn computes missing KV.
        """
        fleet, request = FleetView(self._fleet, Trace()), context.request(self._next_id())
        with fleet.engine(context.engine) as sender:
            async with sender.prep_recv(request) as there:
                if not there.matched_len:
                    return None
                prefix = msgspec.structs.replace(
                    request, seq_id=self._next_id(), prompt=request.prompt[: there.matched_len]
                )
                sent = await migrate_context(fleet, prefix, context.engine, to)
        size = 0 if sent is None else sent.bytes
        return size, f"{there.matched_len} tokens, {size} bytes"

    async def _hold(self, engine: str, over: asyncio.Event) -> None:
        """Keep a leaving engine from counting as empty, here and on the engine itself, until ``over`` is set."""
        with suppress(TercetError):
            async with AsyncExitStack() as held:
                sender = held.enter_context(FleetView(self._fleet, Trace()).engine(engine))
                with suppress(TercetError):
                    token = Request(seq_id=self._next_id(), prompt=(0,))
                    await held.enter_async_context(sender.prep_recv(token))
                await over.wait()

    def _next_id(self) -> str:
        self._ids += 1
        return f"{self._name}-{self._ids}"


class _KeptBindings:
    """The engines of the sessions of ``table`` in a file, which it reads at the start and writes after changes."""

    def __init__(self, file: Path, table: SessionTable, now: float) -> None:
        self._file = file
        self._table = table
        self._thread = FileThread()
        self._written_at = -math.inf
        self._tasks = TaskSet()
        self._said = ""
        try:
            table.restore(msgspec.json.decode(read_whole(file), type=dict[str, dict[Role, str]]), now)
        except FileNotFoundError:
            pass
        except (OSError, *UNREADABLE) as error:
            logger.warning("sessions: %s is not read, so sessions may go to other engines: %s", file, error)
        self._written = table.changes

    def look(self, now: float) -> None:
        """Write the file if there was a change, at most once in :data:`WRITE_INTERVAL_S`."""
        if self._table.changes != self._written and now - self._written_at >= WRITE_INTERVAL_S and not self._tasks:
            self._written, self._written_at = self._table.changes, now
            self._tasks.spawn(self._write(msgspec.json.encode(self._table.bindings)), "session file")

    def close(self) -> None:
        self._tasks.cancel()
        self._thread.close()

    async def _write(self, content: bytes) -> None:
        try:
            await self._thread.run(write_whole, self._file, content)
            self._said = ""
        except (OSError, TimeoutError) as error:
            reason = str(error) or "its file system does not answer"
            if reason != self._said:
                logger.error("sessions: %s is not written: %s", self._file, reason)
            self._said = reason
