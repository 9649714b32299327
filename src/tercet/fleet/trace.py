"""What one request went through: an event for each verb that its program called."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

import msgspec

from tercet.cost import Costs, RouteDecision
from tercet.fleet.calls_in_flight import CallsInFlight, until_lost
from tercet.protocol import (
    Engine,
    EngineError,
    EngineStatus,
    Output,
    OutputStream,
    Request,
    Reservation,
    Sent,
    TercetError,
)


class TraceEvent(msgspec.Struct, omit_defaults=True):
    """One call of a verb. ``begin, end`` are token positions, counts are tokens, ``seconds`` runs to its end.

    For ``start_generate`` ``seconds`` is the time to its first output.
    """

    verb: str
    engine: str
    seconds: float = 0.0
    begin: int = 0
    end: int = 0
    cached: int = 0
    received: int = 0
    computed: int = 0
    bytes: int = 0
    chunks: int = 0
    transport: str = ""
    to: str = ""


class Trace(msgspec.Struct):
    """The events of one request, and the times (seconds) that its client saw.

    ``decision`` is how its route was chosen, where :meth:`tercet.fleet.EngineFleet.route` chose it.
    """

    program: str = ""
    events: list[TraceEvent] = []
    ttft: float | None = None
    tpot: float | None = None
    decision: RouteDecision | None = None


@dataclass(eq=False)
class TracedEngine:
    """An :class:`~tercet.protocol.Engine` that notes in ``trace`` what it is asked for, from which ``costs`` learn.

    ``on_failure`` is told which engine is to blame for an error. ``calls_of`` are the calls in flight of an engine by
    its name: what is asked of an engine here fails once it, or the engine that it works for, is lost.
    """

    engine: Engine
    trace: Trace
    costs: Costs
    on_generate: Callable[[str], object]
    on_failure: Callable[[str, TercetError], None]
    calls_of: Callable[[str], CallsInFlight]

    @property
    def calls(self) -> CallsInFlight:
        """What waits for this engine."""
        return self.calls_of(self.name)

    def failed(self, error: TercetError, receiver: str | None = None) -> None:
        """Blame who is at fault for an error of a call here: a push that ``receiver`` does not take is its failure."""
        by_receiver = receiver if error.param == "kv_addr_info" else None
        self.on_failure(error.blames or by_receiver or self.name, error)

    @contextmanager
    def _watched(self, receiver: str | None = None) -> Generator[None]:
        try:
            yield
        except TercetError as error:
            self.failed(error, receiver)
            raise

    @property
    def name(self) -> str:
        """The engine's name."""
        return self.engine.name

    @asynccontextmanager
    async def prep_recv(self, request: Request, end: int | None = None) -> AsyncGenerator[Reservation]:
        started = self.costs.clock()
        async with AsyncExitStack() as stack:
            with self._watched():
                async with until_lost(self.calls):
                    reservation = await stack.enter_async_context(self.engine.prep_recv(request, end))
            event = TraceEvent("prep_recv", self.name, end=reservation.end, cached=reservation.matched_len)
            self.note(event, started)
            yield reservation

    async def extend_recv(self, reservation: Reservation, request: Request, end: int | None = None) -> Reservation:
        started = self.costs.clock()
        with self._watched():
            async with until_lost(self.calls):
                extended = await self.engine.extend_recv(reservation, request, end)
        self.note(TraceEvent("extend_recv", self.name, end=extended.end, cached=extended.matched_len), started)
        return extended

    async def remote_send(
        self, request: Request, to: Reservation, begin: int, end: int | None = None, sample: bool = False
    ) -> Sent:
        started = self.costs.clock()
        stop = to.end if end is None else end
        receiver = to.kv_addr_info.engine
        with self._watched(receiver), self.costs.sending(self.name, request, begin, stop) as done:
            async with until_lost(self.calls, self.calls_of(receiver)):
                sent = await self.engine.remote_send(request, to, begin, end, sample)
            done(sent.usage)
        event = TraceEvent(
            "remote_send",
            self.name,
            begin=sent.begin,
            end=sent.end,
            cached=sent.usage.cached,
            computed=sent.usage.computed,
            bytes=sent.bytes,
            chunks=sent.chunks,
            transport=sent.transport,
            to=receiver,
        )
        self.note(event, started)
        return sent

    def start_generate(self, request: Request, begin: int = 0, output: Sequence[int] = ()) -> OutputStream:
        stream = self.engine.start_generate(request, begin, output)
        stream.subscribe(self.costs.generating(self.name, request, begin, len(output)))
        event = TraceEvent("start_generate", self.name, begin=begin, end=request.num_tokens + len(output))
        stream.subscribe(_GenerationTrace(self, event, stream))
        return stream

    def note(self, event: TraceEvent, started: float) -> None:
        """Add an event that began then."""
        event.seconds = self.costs.clock() - started
        self.trace.events.append(event)

    async def abort(self, seq_id: str) -> None:
        await self.engine.abort(seq_id)

    async def status(self) -> EngineStatus:
        return await self.engine.status()


class _GenerationTrace:
    """Observes one stream for a traced engine: its start in the trace, its failure to who picks engines."""

    def __init__(self, engine: TracedEngine, event: TraceEvent, stream: OutputStream) -> None:
        self._engine = engine
        self._event = event
        self._stream = stream
        self._noted = ExitStack()

    def on_start(self) -> None:
        self._started = self._engine.costs.clock()
        self._noted.enter_context(self._engine.calls.noted(self._stream.give_up))
        self._engine.on_generate(self._engine.name)

    def on_output(self, output: Output) -> None:
        usage = output.usage
        if usage is not None:
            event = self._event
            event.cached, event.received, event.computed = usage.cached, usage.received, usage.computed
            self._engine.note(event, self._started)
        if output.finish_reason is not None and output.broken_off:
            error = EngineError(f"{self._engine.name} ended the sequence: {output.finish_reason}")
            self._engine.failed(error)

    def on_end(self, error: BaseException | None) -> None:
        self._noted.close()
        if isinstance(error, TercetError):
            self._engine.failed(error)
