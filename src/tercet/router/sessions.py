"""Carries out what :class:`~tercet.decisions.sessions.SessionTable` decides: pins KV by leases, and moves contexts."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Literal, Protocol

import msgspec

from tercet.aio import TaskSet
from tercet.decisions.sessions import Action, Context, EngineSeen, Keep, MoveContext, Pause, SessionTable, session_named
from tercet.fleet import EngineFleet, Member, RunningSequence, Trace
from tercet.programs import migrate_context
from tercet.protocol import Request, TercetError
from tercet.protocol.headers import SESSION_FINAL_HEADER
from tercet.settings.log_events import SESSION_MOVE
from tercet.settings.session_settings import SessionSettings

LOOK_INTERVAL_S = 0.25
# A pin is renewed within the time to live of an engine's lease.
RENEWAL_INTERVAL_S = 15.0
MOVE_DEADLINE_S = 30.0
# The longest wait of a turn for its context to arrive; after that it is computed.
ARRIVAL_DEADLINE_S = 5.0

Ran = Literal["first", "bound", "other"]
"""Where a turn ran: the session's first one, on the engine that the session belonged to, or on another one."""
MoveEnd = Literal["moved", "absent", "failed"]
PinEnd = Literal["given_up", "refused", "lost"]


class SessionMetrics(Protocol):
    """What counts sessions: the router's metrics, or a simulation."""

    def sizes(self, sessions: int, kept: int) -> None:
        """Sessions that are remembered, and contexts that are pinned."""
        ...

    def turn(self, ran: Ran) -> None:
        """A turn has ended."""
        ...

    def paused(self, waited_for: Pause, seconds: float) -> None:
        """A turn begins after a pause."""
        ...

    def moved(self, end: MoveEnd, sent: int) -> None:
        """A move of a context is over; ``sent`` are bytes."""
        ...

    def unpinned(self, end: PinEnd) -> None:
        """A pin is over."""
        ...


class LiveEngines(Mapping[str, EngineSeen]):
    """The fleet's engines as they are now, by name."""

    def __init__(self, fleet: EngineFleet) -> None:
        self._fleet = fleet
        self._members = {member.name: member for member in fleet.members}

    def __getitem__(self, name: str) -> EngineSeen:
        return self._seen(self._members[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    @property
    def any_leaving(self) -> bool:
        """Whether one is to be emptied."""
        return any(member.leaving for member in self._members.values())

    def _seen(self, member: Member) -> EngineSeen:
        last = self._fleet.knowledge.loads.last(member.name)
        load = None if last is None else last[0]
        return EngineSeen(
            member.name, member.is_open and member.reachable, member.can("decode"), member.leaving, member.kv_tokens,
            0.0 if load is None else load.kv_usage, 0 if load is None else load.waiting,
            member.revision,
        )  # fmt: skip


class Sessions:
    """The sessions of this router process. ``table`` decides; picks of ``fleet`` go by it.

    ``name`` begins the ids of leases and sends, which must not be those of another process.
    """

    def __init__(
        self, fleet: EngineFleet, settings: SessionSettings, metrics: SessionMetrics, name: str | None = None
    ) -> None:
        self.table = fleet.sessions = SessionTable(settings)
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
        fleet.when_reopened(self._wake.set)

    async def run(self) -> None:
        """Look at the engines until cancelled, at once when one begins to leave."""
        try:
            while True:
                self._wake.clear()
                self._look()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), LOOK_INTERVAL_S)
        finally:
            await self._tasks.close()

    # ---- turns ---------------------------------------------------------------------------------------------------

    async def begins(self, request: Request) -> None:
        """A turn begins, if the request has a session: return when its context is where it will run."""
        session = session_named(request)
        if session is None:
            return
        actions, pause = self.table.begins(session, self._clock())
        self._belonged[request.seq_id] = self.table.engine_of(session, "decode")
        self._act(actions)
        if pause is not None:
            self._metrics.paused(*pause)
        engines = LiveEngines(self._fleet)
        if engines.any_leaving:
            self._act(self.table.arrives(session, request, engines))
        if moves := [self._moves[context] for context in self.table.moving(session) if context in self._moves]:
            await asyncio.wait(moves, timeout=ARRIVAL_DEADLINE_S)
            self._belonged[request.seq_id] = self.table.engine_of(session, "decode")

    def ends(self, sequence: RunningSequence) -> None:
        """A turn that began is over, whatever became of it."""
        request = sequence.request
        session = session_named(request)
        if session is None or request.seq_id not in self._belonged:
            return
        engine, belonged = sequence.engine if sequence.tokens else "", self._belonged.pop(request.seq_id)
        if engine:
            self._metrics.turn("first" if belonged is None else "bound" if engine == belonged else "other")
        self._act(self.table.ends(session, request, sequence.tokens, engine, self._clock()))
        if request.headers.get(SESSION_FINAL_HEADER, "").strip().lower() == "true":
            self._act(self.table.over(session))
        if (calls_tool := self._answered.pop(request.seq_id, None)) is not None:
            self.answered(request, calls_tool=calls_tool)

    def answered(self, request: Request, *, calls_tool: bool) -> None:
        """The client has the answer of a turn; ``calls_tool``: it comes back with a tool's result."""
        session = session_named(request)
        if session is not None and request.seq_id in self._belonged:
            self._answered[request.seq_id] = calls_tool  # the turn itself is not over yet
        elif session is not None:
            pause: Pause = "tool" if calls_tool else "client"
            self._act(self.table.pauses(session, pause, LiveEngines(self._fleet), self._clock()))

    # ---- what is decided, done -----------------------------------------------------------------------------------

    def _look(self) -> None:
        if not self.table and not self._pins:
            return
        engines = LiveEngines(self._fleet)
        self._act(self.table.look(engines, self._clock()))
        self._metrics.sizes(len(self.table), self.table.kept)
        emptied = {context.engine for context in self._moves}
        for engine in emptied - self._holds.keys():
            self._holds[engine] = over = asyncio.Event()
            self._tasks.spawn(self._hold(engine, over), f"hold of {engine}")
        for engine in self._holds.keys() - emptied:
            self._holds.pop(engine).set()

    def _act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            context = action.context
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
        """Hold a lease of the context's blocks, which makes them no candidates for eviction, until it is ``over``."""
        end: PinEnd = "given_up"
        request = context.request(self._next_id())
        try:
            engine = self._fleet.member(context.engine).engine
            async with engine.prep_recv(request) as space:
                if 2 * space.matched_len < context.num_tokens:  # most of it is not there any more
                    end = "refused"
                    return
                self.table.kept_since(context, self._clock())
                while not over.is_set():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(over.wait(), RENEWAL_INTERVAL_S)
                        break
                    await engine.extend_recv(space, request)
        except TercetError as error:
            end = "refused" if error.code == "no_space" else "lost"
        finally:
            if self._pins.get(context) is over:
                del self._pins[context]
                self.table.not_kept(context)
            self._metrics.unpinned(end)

    async def _move(self, context: Context, to: str) -> None:
        source, end, sent, reason = context.engine, "failed", 0, f"it took longer than {MOVE_DEADLINE_S:g} s"
        try:
            async with asyncio.timeout(MOVE_DEADLINE_S):
                copied = await self._copied(context, to)
            end, sent, reason = ("absent", 0, "its cache has none of it") if copied is None else ("moved", *copied)
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
        """Copy what the context's engine has in its cache; returns bytes and words, or None if it has nothing.

        It is pinned meanwhile. Nothing is computed there for it: the next turn can do that where it runs.
        """
        fleet, request = self._fleet.traced(Trace()), context.request(self._next_id())
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
        """Have an engine that leaves wait for the next move: it is not empty, neither here nor for itself."""
        with suppress(TercetError):
            async with AsyncExitStack() as held:
                sender = held.enter_context(self._fleet.traced(Trace()).engine(engine))
                with suppress(TercetError):
                    token = Request(seq_id=self._next_id(), prompt=(0,))
                    await held.enter_async_context(sender.prep_recv(token))
                await over.wait()

    def _next_id(self) -> str:
        self._ids += 1
        return f"{self._name}-{self._ids}"
