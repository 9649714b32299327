"""The traces of requests that this process keeps: the running ones, the last ones, and the slowest ones."""

from __future__ import annotations

import heapq
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec

from tercet.fleet import RunningSequence, Trace
from tercet.protocol import TercetError, Unauthorized
from tercet.protocol.names import kept_name
from tercet.protocol.spans import SpanContext
from tercet.protocol.trace import PickEvent, TraceEvent
from tercet.router.serve.moves import MoveRecord
from tercet.wire.serving.request_context import RequestContext

KEPT = 1000
KEPT_BYTES = 64 * 1024 * 1024
"""Most bytes of the last traces as they are kept; slowest ones have a tenth of it. A usual trace has 2,000 bytes."""
# The number of slowest requests that are kept is this fraction of the number of last ones: a tenth.
SLOWEST_SHARE = 10
RUNNING, SERVED, LEFT = "running", "served", "client_left"
MoveOf = Callable[[int], MoveRecord | None]


class SequenceTrace(msgspec.Struct, frozen=True):
    """One sequence of a request. ``at`` is in seconds since the request's arrival, times of events are since ``at``."""

    seq_id: str
    program: str
    at: float
    prompt_tokens: int
    output_tokens: int
    ttft: float | None
    tpot: float | None
    events: list[TraceEvent]
    picks: list[PickEvent]
    failed: list[TraceEvent]
    moves: list[MoveRecord]


class RequestTrace(msgspec.Struct, frozen=True):
    """One request. ``at`` is the Unix time of its arrival, ``seconds`` its duration, up to now if it runs.

    ``outcome`` is ``running``, ``served``, ``client_left``, or the code of the error that its client got; ``reason`` is
    then the error's message. ``waited`` is the wait for admission in seconds. ``process`` is the id of the router
    process that served it. ``trace_id`` and ``span`` are its ids in a distributed trace, ``parent`` its client's span.
    """

    request_id: str
    path: str
    model: str
    at: float
    seconds: float
    outcome: str
    reason: str = ""
    waited: float = 0.0
    process: int = 0
    stream: bool = False
    trace_id: str = ""
    span: str = ""
    parent: str = ""
    sequences: list[SequenceTrace] = []

    def is_called(self, name: str) -> bool:
        """True if ``name`` is the id of the request, of its answer, of one of its sequences, or of its trace."""
        if name in (self.request_id, self.trace_id):
            return bool(name)
        return any(each.seq_id == name or each.seq_id.startswith(f"{name}-") for each in self.sequences)

    @property
    def engines(self) -> list[str]:
        """Names of the engines that were called for the request, in the order of their first call."""
        return list(dict.fromkeys(e.engine for s in self.sequences for e in (*s.events, *s.failed) if e.engine))


class FollowedRequest:
    """A running request; ``caller`` is its client's place in a distributed trace, ``place`` the request's own place.

    ``is_id_made`` is true if the router made its id, since the client sent no ``x-request-id``.
    """

    __slots__ = ("_at", "_began", "caller", "context", "is_id_made", "place", "request_id", "waited")

    def __init__(
        self, context: RequestContext, request_id: str, caller: SpanContext | None, place: SpanContext | None
    ) -> None:
        self.context = context
        self.request_id = request_id
        self.caller = caller
        self.place = place
        self.waited = 0.0
        self.is_id_made = False
        self._began = context.began
        self._at = time.time() - (time.monotonic() - context.began)

    def admitted(self) -> None:
        """Record that the request was admitted."""
        self.waited = time.monotonic() - self._began

    def seen(self, move_of: MoveOf, is_over: bool = True, error: TercetError | None = None) -> RequestTrace:
        """Return the trace of the request as of now."""
        context, place = self.context, self.place
        pairs = zip(cast("list[RunningSequence]", context.sequences), cast("list[Trace]", context.traces), strict=False)
        sequences = [_sequence(sequence, trace, self._began, move_of) for sequence, trace in pairs]
        error = error or context.failed
        outcome = error.code if error is not None else RUNNING
        if is_over and error is None:
            ended = not context.client_left and all(each.ended for each in context.sequences)
            outcome = SERVED if ended else LEFT
        has_span = place is not None and place is not self.caller
        return RequestTrace(
            request_id=self.request_id,
            path=context.path,
            model=kept_name(context.asked.model or ""),
            at=self._at,
            seconds=time.monotonic() - self._began,
            outcome=outcome,
            reason="" if error is None else error.message,
            waited=self.waited,
            process=os.getpid(),
            stream=bool(context.asked.stream),
            trace_id="" if place is None else place.trace_id,
            span=place.span_id if place is not None and has_span else "",
            parent="" if self.caller is None else self.caller.span_id,
            sequences=sequences,
        )


def _sequence(sequence: RunningSequence, trace: Trace, began: float, move_of: MoveOf) -> SequenceTrace:
    moves = [move_of(event.number) for event in trace.events if event.verb == "move"]
    return SequenceTrace(
        sequence.request.seq_id, trace.program, sequence.began - began, sequence.request.num_tokens,
        len(sequence.tokens), sequence.ttft, sequence.tpot, trace.events, trace.picks, trace.failed,
        [each for each in moves if each is not None],
    )  # fmt: skip


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RequestTrace).decode


class RequestTraces:
    """The traces of this process: all running requests, the last ``kept``, and a tenth as many of the slowest ones.

    Traces of requests that have ended are kept encoded: that takes a quarter of the memory, and its size is known.
    ``move_of`` returns the record of a move by its number. ``on_end`` gets each request of a sampled distributed trace
    that has ended, with its place in that trace.
    """

    def __init__(
        self,
        kept: int = KEPT,
        move_of: MoveOf = lambda _: None,
        on_end: Callable[[RequestTrace, SpanContext], object] = lambda trace, place: None,
    ) -> None:
        self._kept = kept
        self._move_of = move_of
        self._on_end = on_end
        self._running: dict[FollowedRequest, None] = {}
        self._last: deque[bytes] = deque()
        self._slowest: list[tuple[float, int, bytes]] = []
        self._last_bytes = self._slowest_bytes = 0
        self._numbers = itertools.count()

    @contextmanager
    def following(
        self, context: RequestContext, request_id: str, caller: SpanContext | None = None,
        place: SpanContext | None = None,
    ) -> Generator[FollowedRequest]:  # fmt: skip
        """Follow a request while entered, and keep its trace at the exit."""
        followed = FollowedRequest(context, kept_name(request_id), caller, place)
        self._running[followed] = None
        try:
            yield followed
        finally:
            del self._running[followed]
            self._keep(followed)

    def _keep(self, followed: FollowedRequest) -> None:
        if isinstance(followed.context.failed, Unauthorized):  # callers without a key must not displace kept traces
            return
        trace = followed.seen(self._move_of)
        if followed.place is not None and followed.place.sampled and followed.place is not followed.caller:
            self._on_end(trace, followed.place)
        if not self._kept:
            return
        encoded = _encode(trace)
        self._last.append(encoded)
        self._last_bytes += len(encoded)
        while len(self._last) > self._kept or self._last_bytes > KEPT_BYTES:
            self._last_bytes -= len(self._last.popleft())
        heapq.heappush(self._slowest, (trace.seconds, next(self._numbers), encoded))
        self._slowest_bytes += len(encoded)
        most, most_bytes = max(1, self._kept // SLOWEST_SHARE), KEPT_BYTES // SLOWEST_SHARE
        while len(self._slowest) > most or self._slowest_bytes > most_bytes:
            self._slowest_bytes -= len(heapq.heappop(self._slowest)[2])

    @property
    def kept(self) -> tuple[int, int]:
        """Number and bytes of the traces that are kept; one of the last and of the slowest ones counts twice."""
        return len(self._last) + len(self._slowest), self._last_bytes + self._slowest_bytes

    def __iter__(self) -> Iterator[RequestTrace]:
        """Yield all traces, newest first, and then older ones that are kept as slowest, slowest first."""
        yield from (each.seen(self._move_of, is_over=False) for each in reversed([*self._running]))
        yield from map(self._seen_again, reversed([*self._last]))
        last = {id(each) for each in self._last}
        slowest = [encoded for _, _, encoded in sorted(self._slowest, reverse=True) if id(encoded) not in last]
        yield from map(self._seen_again, slowest)

    def _seen_again(self, encoded: bytes) -> RequestTrace:
        """Return a kept trace; its moves may have ended after the request."""
        trace = _decode(encoded)
        for sequence in trace.sequences:
            sequence.moves[:] = [
                (self._move_of(move.number) or move) if move.outcome == "under_way" else move for move in sequence.moves
            ]
        return trace

    def called(self, name: str) -> list[RequestTrace]:
        """Return the traces with this id, newest first: a client may use one id for several requests."""
        return [each for each in self if each.is_called(name)]

    def newest(self, most: int) -> list[RequestTrace]:
        """Return the newest traces, at most ``most``."""
        return list(itertools.islice(self, most))

    def slowest(self, most: int) -> list[RequestTrace]:
        """Return the slowest traces, at most ``most``, of all that are kept or run."""
        return heapq.nlargest(most, self, key=lambda trace: trace.seconds)


def shown(trace: RequestTrace) -> dict[str, Any]:
    """Return a trace in the form of the routes' answers."""
    return msgspec.to_builtins(trace)
