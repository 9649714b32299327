"""What one request went through: an event for each verb that its program called."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, contextmanager

import msgspec

from tercet.cost import Costs, RouteDecision
from tercet.protocol import (
    Engine,
    EngineError,
    EngineStatus,
    Output,
    Request,
    Reservation,
    Sent,
    Stream,
    Tap,
    TercetError,
    noting,
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


class TracedEngine:
    """An engine that notes in ``trace`` what it is asked to do, lets ``costs`` learn from it, and tells of failures."""

    def __init__(
        self, engine: Engine, trace: Trace, costs: Costs, on_failure: Callable[[TercetError], None]
    ) -> None:  # fmt: skip
        self._engine = engine
        self._trace = trace
        self._costs = costs
        self._clock = costs.clock
        self._on_failure = on_failure

    @contextmanager
    def _watched(self) -> Generator[None]:
        try:
            yield
        except TercetError as error:
            self._on_failure(error)
            raise

    @property
    def name(self) -> str:
        """The engine's name."""
        return self._engine.name

    def prep_recv(self, request: Request, end: int | None = None) -> AbstractAsyncContextManager[Reservation]:
        """See :meth:`tercet.protocol.Engine.prep_recv`."""
        return self._prep_recv(request, end)

    @asynccontextmanager
    async def _prep_recv(self, request: Request, end: int | None) -> AsyncGenerator[Reservation]:
        started = self._clock()
        async with AsyncExitStack() as stack:
            with self._watched():
                reservation = await stack.enter_async_context(self._engine.prep_recv(request, end))
            event = TraceEvent("prep_recv", self.name, end=reservation.end, cached=reservation.matched_len)
            self._note(event, started)
            yield reservation

    async def remote_send(
        self, request: Request, to: Reservation, begin: int, end: int | None = None, sample: bool = False
    ) -> Sent:
        """See :meth:`tercet.protocol.Engine.remote_send`."""
        started = self._clock()
        stop = to.end if end is None else end
        with self._watched(), self._costs.sending(self.name, request, begin, stop) as done:
            sent = await self._engine.remote_send(request, to, begin, end, sample)
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
            to=to.kv_addr_info.engine,
        )
        self._note(event, started)
        return sent

    def start_generate(self, request: Request, begin: int = 0, output: Sequence[int] = ()) -> Stream:
        """See :meth:`tercet.protocol.Engine.start_generate`."""
        tap = Tap()
        return Stream(self._generate(request, begin, output, tap), tap)

    async def _generate(
        self, request: Request, begin: int, output: Sequence[int], tap: Tap
    ) -> AsyncGenerator[Output, None]:
        started = self._clock()
        with self._costs.generating(self.name, request, begin, len(output)) as generation:
            async with aclosing(self._engine.start_generate(request, begin, output)) as stream:
                if isinstance(stream, Stream):
                    stream.tap(noting(tap.offer, generation.note))
                items = aiter(stream)
                while True:
                    try:  # :meth:`_watched` costs more than all the rest that is done for a token
                        item = await anext(items, None)
                    except TercetError as error:
                        self._on_failure(error)
                        raise
                    if item is None:
                        return
                    generation.note(item)
                    if item.usage is not None:
                        self._note_start(request, begin, len(output), item, started)
                    if item.broken_off:
                        self._on_failure(EngineError(f"{self.name} ended the sequence: {item.finish_reason}"))
                    yield item

    def _note_start(self, request: Request, begin: int, num_output: int, item: Output, started: float) -> None:
        usage = item.usage
        if usage is not None:
            event = TraceEvent(
                "start_generate",
                self.name,
                begin=begin,
                end=request.num_tokens + num_output,
                cached=usage.cached,
                received=usage.received,
                computed=usage.computed,
            )
            self._note(event, started)

    def _note(self, event: TraceEvent, started: float) -> None:
        event.seconds = self._clock() - started
        self._trace.events.append(event)

    async def abort(self, seq_id: str) -> None:
        """See :meth:`tercet.protocol.Engine.abort`."""
        await self._engine.abort(seq_id)

    async def status(self) -> EngineStatus:
        """See :meth:`tercet.protocol.Engine.status`."""
        return await self._engine.status()
