"""The trace of one request: an event for each verb that its program called."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import NamedTuple

from tercet.decisions.cost import Costs, RouteDecision
from tercet.fleet.calls_in_flight import CallsInFlight, until_lost
from tercet.fleet.members import Counted, Member
from tercet.fleet.prefix_hits import PrefixHits
from tercet.protocol import (
    EngineError,
    EngineStatus,
    Output,
    OutputStream,
    Request,
    Reservation,
    Sent,
    TercetError,
    Usage,
)
from tercet.protocol.trace import TraceEvent, VerbTrace


class Trace(VerbTrace):
    """The events of one request, and the times (seconds) that its client saw.

    ``decision`` is the choice of its route, if :meth:`tercet.fleet.EngineFleet.route` made it.
    """

    ttft: float | None = None
    tpot: float | None = None
    decision: RouteDecision | None = None


class Tracing(NamedTuple):
    """Record of what engines do for one request.

    ``costs`` learn from it. ``on_generate`` is called with each generation that begins, ``on_failure`` returns the
    engine to blame for an error. ``calls_of`` returns the calls in flight of an engine by its name: a call fails once
    its engine, or the engine that it works for, is lost. ``hits`` compare what picks predicted with what engines found.
    """

    trace: Trace
    costs: Costs
    on_generate: Callable[[Generation], object]
    on_failure: Callable[[str, TercetError], None]
    calls_of: Callable[[str], CallsInFlight]
    hits: PrefixHits


class TracedEngine:
    """An :class:`~tercet.protocol.Engine` for one request, ``counted`` there; records its calls in ``tracing``.

    ``predicted`` is the number of the prompt's tokens that its pick believed in its cache, None without a prediction.
    """

    def __init__(self, member: Member, counted: Counted, tracing: Tracing, predicted: int | None = None) -> None:
        self._member = member
        self.engine = member.engine
        self._counted = counted
        self.tracing = tracing
        self.costs = tracing.costs
        self._predicted = predicted

    def instead(self, member: Member) -> TracedEngine:
        """Another engine for the same request, which counts there once that engine starts to generate."""
        return TracedEngine(member, self._counted, self.tracing)

    def generates(self, generation: Generation) -> None:
        """Record that a generation begins here."""
        self._counted.go_to(self._member)
        self.tracing.on_generate(generation)

    @property
    def calls(self) -> CallsInFlight:
        """Calls that wait for this engine."""
        return self._member.calls

    def failed(self, error: TercetError, receiver: str | None = None) -> None:
        """Record a failed call and the engine to blame: ``receiver`` if it did not accept a push."""
        by_receiver = receiver if error.param == "kv_addr_info" else None
        self.tracing.on_failure(error.blames or by_receiver or self.name, error)

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
            self.found(event)
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
            async with until_lost(self.calls, self.tracing.calls_of(receiver)):
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
        self.found(event)
        self.note(event, started)
        return sent

    def start_generate(self, request: Request, begin: int = 0, output: Sequence[int] = ()) -> OutputStream:
        stream = self.engine.start_generate(request, begin, output)
        cost = self.costs.generating(self.name, request, begin, len(output))
        if cost is not None:
            stream.subscribe(cost)
        event = TraceEvent("start_generate", self.name, begin=begin, end=request.num_tokens + len(output))
        stream.subscribe(Generation(self, request, output, event))
        return stream

    def found(self, event: TraceEvent) -> None:
        """Compare ``cached`` of the engine's first event with the prediction of its pick, within the event's tokens."""
        if self._predicted is not None:
            event.predicted, self._predicted = min(self._predicted, event.end), None
            self.tracing.hits.found(self.name, event.predicted, event.cached)

    def note(self, event: TraceEvent, started: float) -> None:
        """Add an event that began at ``started``."""
        event.seconds = self.costs.clock() - started
        self.tracing.trace.events.append(event)

    async def abort(self, seq_id: str) -> None:
        await self.engine.abort(seq_id)

    async def status(self) -> EngineStatus:
        return await self.engine.status()


class Generation:
    """One ``start_generate`` of an engine, as an observer of its stream.

    ``request`` is the engine's request, ``tokens`` are all output tokens so far, including those of earlier attempts.
    ``begun`` turns true with the engine's first output. Its start is recorded in the trace, its failure reported.
    """

    def __init__(self, engine: TracedEngine, request: Request, output: Sequence[int], event: TraceEvent) -> None:
        self.engine = engine
        self.request = request
        self.tokens = list(output)
        self.begun = False
        self.stream: OutputStream | None = None
        self._event = event
        self._calls = engine.calls
        self._noted: object = None

    @property
    def computed(self) -> int:
        """Tokens whose KV is certainly in the engine: 0 while it waits there, afterwards all except the last one's."""
        return self.request.num_tokens + len(self.tokens) - 1 if self.begun else 0

    def on_start(self, stream: OutputStream) -> None:
        self.stream = stream
        self._started = self.engine.costs.clock()
        self._noted = self._calls.note(stream.give_up, lambda: not self.begun)
        self.engine.generates(self)

    def on_output(self, output: Output) -> None:
        if not self.begun:
            self._begin(output.usage)
        self.tokens += output.token_ids
        if output.finish_reason is not None and output.broken_off:
            error = EngineError(f"{self.engine.name} ended the sequence: {output.finish_reason}")
            self.engine.failed(error)

    def on_end(self, error: BaseException | None) -> None:
        self.stream = None
        self._calls.forget(self._noted)
        if isinstance(error, TercetError):
            self.engine.failed(error)

    def _begin(self, usage: Usage | None) -> None:
        self.begun = True
        if usage is not None:
            event = self._event
            event.cached, event.received, event.computed = usage.cached, usage.received, usage.computed
            self.engine.found(event)
            self.engine.note(event, self._started)
