"""The trace of one request, with an event for each verb that its program called on a :class:`TracedEngine`.

Cached tokens that a pick predicted are compared there with those that the engine found: :class:`PrefixHits`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tercet import logs
from tercet.decisions.cost import RouteDecision
from tercet.fleet.members import Counted, Member, UntilLost
from tercet.protocol import (
    DeadlineExceeded,
    EngineStatus,
    Output,
    OutputStream,
    Request,
    Reservation,
    Sent,
    TercetError,
    spans,
)
from tercet.protocol.spans import PickEvent, SpanContext, TraceEvent, VerbTrace, current_span, working_in

if TYPE_CHECKING:  # engine_fleet makes traced engines
    from tercet.fleet.engine_fleet import FleetView

NEAR = 64
"""Difference in tokens that is ignored: block sizes may differ, and engines compute a prompt's last block again."""
LEAST_PICKS = 16
KEPT = 1 - 1 / 64
"""Factor for an engine's history at each further pick: about the last 64 picks decide."""
DRIFTS, AGREES = 0.25, 0.125
"""Missing shares of the predicted tokens: a drift begins at the first share, and ends below the second."""


@dataclass
class _Hits:
    """Weighted sums of tokens of an engine's latest picks; ``picks`` is their number, up to :data:`LEAST_PICKS`."""

    picks: int = 0
    predicted: float = 0.0
    missing: float = 0.0
    drifts: bool = False

    @property
    def share(self) -> float:
        return self.missing / self.predicted if self.predicted else 0.0

    @property
    def reason(self) -> str:
        return f"{self.share:.0%} of the predicted tokens of its latest picks were missing"


class PrefixHits:
    """Predicted and found tokens of each engine; a drift is logged when it begins and when it ends.

    Only missing tokens count: more tokens than predicted cost nothing.
    """

    def __init__(self) -> None:
        self._engines: dict[str, _Hits] = {}

    def found(self, engine: str, predicted: int, cached: int) -> None:
        """Record that a pick predicted ``predicted`` tokens of a prompt in the engine's cache, which had ``cached``."""
        if not predicted:
            return
        hits = self._engines.setdefault(engine, _Hits())
        hits.picks = min(hits.picks + 1, LEAST_PICKS)
        short = predicted - cached
        hits.predicted = KEPT * hits.predicted + predicted
        hits.missing = KEPT * hits.missing + (short if short > NEAR else 0)
        if hits.drifts:
            if hits.share < AGREES:
                hits.drifts = False
                logs.PREFIX_AGREES.tell(engine=engine, reason=hits.reason)
        elif hits.picks == LEAST_PICKS and hits.share >= DRIFTS:
            hits.drifts = True
            logs.PREFIX_DRIFT.tell(engine=engine, reason=hits.reason)

    @property
    def drifting(self) -> list[str]:
        return [name for name, hits in self._engines.items() if hits.drifts]

    def forget(self, engine: str) -> None:
        self._engines.pop(engine, None)


class Trace(VerbTrace):
    """The events of one request."""

    ttft: float | None = None  # latencies that its client saw, in seconds; none in the background
    tpot: float | None = None
    decision: RouteDecision | None = None  # the choice of its route by :meth:`tercet.fleet.FleetView.route`
    picks: list[PickEvent] = []  # all other picks
    failed: list[TraceEvent] = []  # calls of verbs that failed


@dataclass(slots=True)
class StartedCall:
    """A call of a verb in progress."""

    started: float
    span: SpanContext | None = None  # in a distributed trace
    caller: SpanContext | None = None  # the parent of that span; None if the call has no span


class TracedEngine:
    """An :class:`~tercet.protocol.Engine` for the request of ``view``, which is ``counted`` there.

    Its calls are recorded in the view's trace, and a failed call blames an engine there. A call fails when its engine,
    or the engine that receives its KV, is lost.
    """

    def __init__(
        self, member: Member, counted: Counted, view: FleetView, predicted: int | None = None,
        patience: float | None = None,
    ) -> None:  # fmt: skip
        self._member = member
        self.engine = member.engine
        self.calls = member.calls  # the calls that wait for this engine
        self._counted = counted
        self.view = view
        self.costs = view.fleet.costs  # learn from the calls
        # The number of the prompt's tokens that its pick expected in its cache; None without a prediction.
        self._predicted = predicted
        self._patience = patience  # seconds for a send of cached KV; None for no limit

    def instead(self, member: Member) -> TracedEngine:
        """Return another engine for the same request, which counts there when that engine starts to generate."""
        return TracedEngine(member, self._counted, self.view)

    def generates(self, generation: Generation) -> None:
        # From here on the sequence is this engine's load, and no longer that of the engine it moved away from.
        self._counted.go_to(self._member)
        self.view.on_generate(generation)

    def failed(self, error: TercetError, receiver: str | None = None) -> None:
        """Report a failed call with the engine to blame, which is ``receiver`` if it did not accept the KV."""
        # A sender reports what its receiver refused: avoiding the sender would not help.
        by_receiver = receiver if error.param == "kv_addr_info" else None
        self.view.note_failure(error.blames or by_receiver or self.name, error)

    @contextmanager
    def _watched(self, verb: str, receiver: str | None = None, cached_only: bool = False) -> Generator[StartedCall]:
        call = self.called()
        try:
            with working_in(call.span):
                yield call
        except TercetError as error:
            self.failed(error, receiver)
            self.note_failed(TraceEvent(verb, self.name, to=receiver or "", cached_only=cached_only), call, error)
            raise

    def called(self) -> StartedCall:
        """Return a call that begins now; its caller is a move if the current task makes one, else the program."""
        started, program = self.costs.clock(), self.view.span
        # A span costs 50 us: only requests that are sampled have any, and only if spans go anywhere.
        if program is None or not program.sampled or spans.process.sink is None:  # no span of the call: the caller's
            return StartedCall(started, program)
        here = current_span()
        caller = here if here is not None and here.trace_id == program.trace_id else program
        return StartedCall(started, caller.child(), caller)

    def note_failed(self, event: TraceEvent, call: StartedCall, error: TercetError) -> None:
        event.code, event.reason = error.code, error.message
        self._fill(event, call)
        self.view.trace.failed.append(event)

    @property
    def name(self) -> str:
        return self.engine.name

    @asynccontextmanager
    async def prep_recv(self, request: Request, end: int | None = None) -> AsyncGenerator[Reservation]:
        async with AsyncExitStack() as stack:
            with self._watched("prep_recv") as call:
                # Only until the reservation is there: what the program does with it later has other calls to fail.
                async with UntilLost(self.calls):
                    reservation = await stack.enter_async_context(self.engine.prep_recv(request, end))
            event = TraceEvent("prep_recv", self.name, end=reservation.end, cached=reservation.matched_len)
            self.found(event)
            self.note(event, call)
            yield reservation

    async def extend_recv(self, reservation: Reservation, request: Request, end: int | None = None) -> Reservation:
        with self._watched("extend_recv") as call:
            async with UntilLost(self.calls):
                extended = await self.engine.extend_recv(reservation, request, end)
        self.note(TraceEvent("extend_recv", self.name, end=extended.end, cached=extended.matched_len), call)
        return extended

    async def remote_send(
        self, request: Request, to: Reservation, begin: int, end: int | None = None, sample: bool = False,
        cached_only: bool = False,
    ) -> Sent:  # fmt: skip
        stop = to.end if end is None else end
        receiver = to.kv_addr_info.engine
        self.view.fleet.require_exchange(self.name, receiver)
        if cached_only:
            return await self._pull(request, to, begin, stop)
        with (
            self._watched("remote_send", receiver) as call,
            self.costs.sending(self.name, request, begin, stop) as done,
        ):
            # Either end may be lost: a sender waits for a receiver that will never acknowledge.
            async with UntilLost(self.calls, self.view.fleet.calls_of(receiver)):
                sent = await self.engine.remote_send(request, to, begin, end, sample)
            done(sent.usage)
        event = self._sent(sent, receiver)
        self.found(event)
        self.note(event, call)
        return sent

    async def _pull(self, request: Request, to: Reservation, begin: int, end: int) -> Sent:
        """Have cached KV sent, at most for the time in which it could be computed; what is missing was a wrong belief.

        Raises :class:`~tercet.protocol.DeadlineExceeded` if it takes longer.
        """
        receiver, fleet = to.kv_addr_info.engine, self.view.fleet
        with (
            self._watched("remote_send", receiver, cached_only=True) as call,
            self.costs.pulling(self.name, begin) as reached,
        ):
            try:
                async with asyncio.timeout(self._patience), UntilLost(self.calls, fleet.calls_of(receiver)):
                    sent = await self.engine.remote_send(request, to, begin, end, cached_only=True)
            except TimeoutError as error:
                raise DeadlineExceeded(f"{self.name}: its cached KV did not come within {self._patience} s") from error
            reached(sent.end)
        event = self._sent(sent, receiver)
        event.cached_only = True
        if self._predicted is not None:
            event.predicted = end
            fleet.hits.found(self.name, end, event.cached)
        self.note(event, call)
        return sent

    def _sent(self, sent: Sent, receiver: str) -> TraceEvent:
        return TraceEvent(
            "remote_send", self.name, begin=sent.begin, end=sent.end, cached=sent.usage.cached,
            computed=sent.usage.computed, bytes=sent.bytes, chunks=sent.chunks, transport=sent.transport, to=receiver,
        )  # fmt: skip

    def start_generate(self, request: Request, begin: int = 0, output: Sequence[int] = ()) -> OutputStream:
        call = self.called()
        with working_in(call.span):
            stream = self.engine.start_generate(request, begin, output)
        cost = self.costs.generating(self.name, request, begin, len(output))
        if cost is not None:
            stream.subscribe(cost)
        event = TraceEvent("start_generate", self.name, begin=begin, end=request.num_tokens + len(output))
        stream.subscribe(Generation(self, request, output, event, call))
        return stream

    def found(self, event: TraceEvent) -> None:
        """Compare ``cached`` of the engine's first event with the prediction of its pick, within the event's tokens."""
        if self._predicted is not None:
            # Once: the engine's first event shows what it had; later ones also count what this request has put there.
            event.predicted, self._predicted = min(self._predicted, event.end), None
            self.view.fleet.hits.found(self.name, event.predicted, event.cached)

    def note(self, event: TraceEvent, call: StartedCall) -> None:
        self._fill(event, call)
        self.view.trace.events.append(event)

    def _fill(self, event: TraceEvent, call: StartedCall) -> None:
        event.seconds = self.costs.clock() - call.started
        event.at = call.started - self.view.began
        if call.span is not None and call.caller is not None:
            event.span, event.parent = call.span.span_id, call.caller.span_id

    async def status(self) -> EngineStatus:
        return await self.engine.status()


class Generation:
    """One ``start_generate`` call of an engine, as an observer of its stream: it records the start or failure."""

    def __init__(
        self, engine: TracedEngine, request: Request, output: Sequence[int], event: TraceEvent, call: StartedCall
    ) -> None:
        self.engine = engine
        self.request = request  # the engine's
        self.tokens = list(output)  # all output tokens so far, including those of earlier attempts
        self.begun = False  # true from the engine's first output on
        self.stream: OutputStream | None = None
        self._event, self._call = event, call
        self._noted: object = None

    @property
    def computed(self) -> int:
        """Number of tokens whose KV is certainly in the engine: 0 while it waits, then all tokens except the last."""
        return self.request.num_tokens + len(self.tokens) - 1 if self.begun else 0

    def on_start(self, stream: OutputStream) -> None:
        self.stream = stream
        # A stream starts when it is read, which may be long after it was made.
        self._call.started = self.engine.costs.clock()
        self._noted = self.engine.calls.note(stream.give_up, lambda: not self.begun)
        self.engine.generates(self)

    def on_output(self, output: Output) -> None:
        if not self.begun:
            self.begun = True
            if output.usage is not None:
                event, usage = self._event, output.usage
                event.cached, event.received, event.computed = usage.cached, usage.received, usage.computed
                self.engine.found(event)
                self.engine.note(event, self._call)
            if not self.engine.view.answered:
                self.engine.view.answered = True
                for call in self.engine.view.fleet.on_answered:
                    call(self)
        self.tokens += output.token_ids

    def on_end(self, error: BaseException | None) -> None:
        # First of all: a stream that has ended must not be made to fail by the loss of its engine.
        self.stream = None
        self.engine.calls.forget(self._noted)
        self._event.total = self.engine.costs.clock() - self._call.started
        if isinstance(error, TercetError):
            self.engine.failed(error)
            if self.begun:  # the trace has this event already
                self._event.code, self._event.reason = error.code, error.message
            else:
                self.engine.note_failed(self._event, self._call, error)
