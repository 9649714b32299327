"""The traces of requests: those that this process keeps, their export as spans, and those of the other processes.

A process keeps the traces of running requests, of the last ones and of the slowest ones. Processes that share a state
answer each other over local sockets: a question is one line of JSON; the answer has traces, or exemplars. The sockets
have abstract names instead of files, since the state may be on a file system that is slow or shared with other
machines, whose processes are not asked.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import os
import socket
import struct
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar, cast

import msgspec

from tercet.fleet import RunningSequence, Trace
from tercet.protocol import TercetError, Unauthorized
from tercet.protocol.names import kept_name
from tercet.protocol.spans import FALLBACK, RETRY, PickEvent, Span, SpanContext, TraceEvent, new_span_id
from tercet.protocol.wire import UNREADABLE
from tercet.router.observe.metrics import WORKERS_VARIABLE, Exemplars, KeptExemplar
from tercet.router.serve.moves import MoveRecord
from tercet.wire.serving.server_access import RequestContext

KEPT = 1000
# Most bytes of the last traces as they are kept; slowest ones have a tenth of it. A usual trace has 2,000 bytes.
KEPT_BYTES = 64 * 1024 * 1024
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

    @property
    def engines(self) -> list[str]:
        """Names of the engines that were called for the request, in the order of their first call."""
        return list(dict.fromkeys(e.engine for s in self.sequences for e in (*s.events, *s.failed) if e.engine))


class FollowedRequest:
    """A running request; ``caller`` is its client's span in a distributed trace, ``span`` the request's own span.

    ``is_id_made`` is true if the router made its id, since the client sent no ``x-request-id``.
    """

    __slots__ = ("_at", "_began", "caller", "context", "is_id_made", "request_id", "span", "waited")

    def __init__(
        self, context: RequestContext, request_id: str, caller: SpanContext | None, span: SpanContext | None
    ) -> None:
        self.context = context
        self.request_id = request_id
        self.caller = caller
        self.span = span
        self.waited = 0.0
        self.is_id_made = False
        self._began = context.began
        self._at = time.time() - (time.monotonic() - context.began)

    def seen(self, move_of: MoveOf, is_over: bool = True, error: TercetError | None = None) -> RequestTrace:
        context, span = self.context, self.span
        pairs = zip(cast("list[RunningSequence]", context.sequences), cast("list[Trace]", context.traces), strict=False)
        sequences = [_sequence(sequence, trace, self._began, move_of) for sequence, trace in pairs]
        error = error or context.failed
        outcome = error.code if error is not None else RUNNING
        if is_over and error is None:
            # Without an error and without an end: the client left, or the stream was closed with it.
            ended = not context.client_left and all(each.ended for each in context.sequences)
            outcome = SERVED if ended else LEFT
        has_span = span is not None and span is not self.caller
        return RequestTrace(
            request_id=self.request_id, path=context.path, model=kept_name(context.asked.model or ""), at=self._at,
            seconds=time.monotonic() - self._began, outcome=outcome, reason="" if error is None else error.message,
            waited=self.waited, process=os.getpid(), stream=bool(context.asked.stream),
            trace_id="" if span is None else span.trace_id,
            span=span.span_id if span is not None and has_span else "",
            parent="" if self.caller is None else self.caller.span_id, sequences=sequences,
        )  # fmt: skip


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
        on_end: Callable[[RequestTrace, SpanContext], object] = lambda trace, span: None,
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
        span: SpanContext | None = None,
    ) -> Generator[FollowedRequest]:  # fmt: skip
        """Follow a request while entered, and keep its trace at the exit."""
        followed = FollowedRequest(context, kept_name(request_id), caller, span)
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
        if followed.span is not None and followed.span.sampled and followed.span is not followed.caller:
            self._on_end(trace, followed.span)
        if not self._kept:
            return
        encoded = _encode(trace)
        # Encoded once for both lists, which share the bytes.
        self._last.append(encoded)
        self._last_bytes += len(encoded)
        while len(self._last) > self._kept or self._last_bytes > KEPT_BYTES:
            self._last_bytes -= len(self._last.popleft())
        # The number decides between equal times: bytes would be compared otherwise, to no purpose.
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
        # Copies, as requests begin and end while the caller reads on.
        yield from (each.seen(self._move_of, is_over=False) for each in reversed([*self._running]))
        yield from map(self._seen_again, reversed([*self._last]))
        # By identity: both lists have the same object, and comparing long bytes would be slow.
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
        """Return the traces with this id, newest first: a client may use one id for several requests.

        It is the id of the request, of its answer, of one of its sequences, or of its trace.
        """
        found: list[RequestTrace] = []
        for each in self:
            # The ids of sequences begin with that of their answer.
            of_answer = any(f"{sequence.seq_id}-".startswith(f"{name}-") for sequence in each.sequences)
            if name and (of_answer or name in (each.request_id, each.trace_id)):
                found.append(each)
        return found

    def newest(self, most: int) -> list[RequestTrace]:
        return list(itertools.islice(self, most))

    def slowest(self, most: int) -> list[RequestTrace]:
        """Return the slowest traces, at most ``most``, of all that are kept or run."""
        return heapq.nlargest(most, self, key=lambda trace: trace.seconds)


NANOSECONDS = 1_000_000_000
# Shortest wait (seconds) for admission that gets a span: most requests are admitted at once, and a span costs 50 us.
LEAST_WAIT_S = 0.001
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
# Fields of an event that become attributes of its span: counts of tokens, and others.
_COUNTS = ("begin", "end", "cached", "received", "computed")
_OTHERS = ("bytes", "chunks", "transport", "to")


def spans_of(trace: RequestTrace, span: SpanContext) -> Iterator[Span]:
    """Yield ``span``, that of a request, and below it admission, picks, calls, first tokens, retries, moves."""
    at = int(trace.at * NANOSECONDS)
    attributes = request_attributes(trace.path, trace.model, trace.request_id)
    attributes |= {"gen_ai.request.stream": trace.stream, "tercet.outcome": trace.outcome}
    if trace.sequences:
        attributes["gen_ai.usage.input_tokens"] = sum(each.prompt_tokens for each in trace.sequences)
        attributes["gen_ai.usage.output_tokens"] = sum(each.output_tokens for each in trace.sequences)
        attributes["tercet.program"] = trace.sequences[0].program
        if (ttft := trace.sequences[0].ttft) is not None:
            attributes["tercet.ttft"] = ttft
    # Times of events are relative to their sequence, and those of sequences to the request.
    error, ended = "" if trace.outcome in (SERVED, RUNNING) else trace.outcome, at + _ns(trace.seconds)
    yield Span(f"POST {trace.path}", span, trace.parent, at, ended, "server", attributes, (), error, trace.reason)
    if trace.waited >= LEAST_WAIT_S:
        yield Span("admission", span.child(), span.span_id, at, at + _ns(trace.waited))
    for sequence in trace.sequences:
        begin = at + _ns(sequence.at)
        named: dict[str, Any] = {"tercet.seq_id": sequence.seq_id}
        for pick in sequence.picks:
            if not pick.scores:  # a pick by turns: the span of its call names the engine
                continue
            picked, attributes = begin + _ns(pick.at), {**named, "tercet.role": pick.role, "tercet.picker": pick.by}
            attributes |= {"tercet.engine": pick.engine}
            attributes |= {f"tercet.score.{name}": score for name, score in pick.scores.items()}
            attributes |= {f"tercet.scorer.{name}": score for name, score in pick.parts.items()}
            if pick.predicted is not None:
                attributes["tercet.tokens.predicted"] = pick.predicted
            yield Span("pick", span.child(), span.span_id, picked, picked, attributes=attributes)
        for event in sequence.events:
            if event.verb in (FALLBACK, RETRY):
                again = begin + _ns(event.at)
                attributes = {**named, "tercet.engine": event.engine, "tercet.tokens.end": event.end}
                # A link to its cause: the last failed call of the engine at fault before it.
                failed = [
                    call for call in (*sequence.failed, *sequence.events)
                    if call.span and call.code and call.engine == event.engine and call.at <= event.at
                ]  # fmt: skip
                links = [_of_trace(span, call) for call in sorted(failed, key=lambda call: call.at)[-1:]]
                yield Span(
                    event.verb, span.child(), span.span_id, again, again, "internal", attributes, links,
                    event.code or event.verb, event.reason,
                )  # fmt: skip
                continue
            call = _call(event, sequence, span, begin, named)
            yield call
            if event.verb == "start_generate":
                first = begin + _ns(event.at + event.seconds)
                yield Span("first_token", call.context.child(), call.context.span_id, call.began_ns, first)
        for event in sequence.failed:
            yield _call(event, sequence, span, begin, named)


def request_attributes(path: str, model: str, request_id: str) -> dict[str, Any]:
    """Return the attributes of a request that are known at its arrival."""
    found = {"http.request.method": "POST", "url.path": path, "tercet.request_id": request_id}
    if path in _OPERATIONS:
        found["gen_ai.operation.name"] = _OPERATIONS[path]
    if model:
        found["gen_ai.request.model"] = model
    return found


def _call(event: TraceEvent, sequence: SequenceTrace, span: SpanContext, begin: int, named: Mapping[str, str]) -> Span:
    """Return the span of a verb or a move; a send is linked to the reservation on the other engine that it filled."""
    at = begin + _ns(event.at)
    own = SpanContext(span.trace_id, event.span or new_span_id(), span.sampled, span.state)
    attributes: dict[str, Any] = {**named, "tercet.verb": event.verb, "tercet.engine": event.engine}
    attributes |= {f"tercet.tokens.{name}": found for name in _COUNTS if (found := getattr(event, name))}
    attributes |= {f"tercet.{name}": found for name in _OTHERS if (found := getattr(event, name))}
    if event.predicted is not None:
        attributes["tercet.tokens.predicted"] = event.predicted
    if event.verb == "move":
        attributes |= {"tercet.move.reason": event.reason, "tercet.move.outcome": event.outcome}
        if event.pause is not None:
            attributes["tercet.move.pause"] = event.pause
        stages = next((move.stages for move in sequence.moves if move.number == event.number), ())
        attributes["tercet.move.stages"] = [f"{stage.begin}-{stage.end}" for stage in stages]
    # A send and the reservation that it fills are calls of one program, so neither is the other's parent.
    links = [
        _of_trace(span, other)
        for other in sequence.events
        if event.verb == "remote_send" and other.verb == "prep_recv" and other.engine == event.to and other.span
    ]
    ended = at + _ns(max(event.seconds, event.total))
    error = event.code or ("" if event.verb != "move" or event.outcome == "moved" else event.outcome)
    return Span(
        event.verb, own, event.parent or span.span_id, at, ended, "internal" if event.verb == "move" else "client",
        attributes, links, error, event.reason if error else "",
    )  # fmt: skip


def _of_trace(span: SpanContext, event: TraceEvent) -> SpanContext:
    return SpanContext(span.trace_id, event.span, span.sampled)


def _ns(seconds: float) -> int:
    return int(seconds * NANOSECONDS)


T = TypeVar("T")
logger = logging.getLogger("tercet.router")
ANSWER_SECONDS = 3.0
LONGEST_QUESTION = 4096
LONGEST_ANSWER = 64 * 1024 * 1024
MOST_LISTED = 100
_PEER = struct.Struct("3i")


class TraceQuestion(msgspec.Struct, frozen=True, omit_defaults=True):
    """A question for traces: those with an ``id``, or a number of ``newest`` or ``slowest`` ones.

    ``watch`` asks for future frames of the page instead, ``history`` for its past points; ``exemplars`` asks for the
    exemplars of a worker that counts in that folder.
    """

    id: str = ""
    newest: int = 0
    slowest: int = 0
    watch: bool = False
    history: bool = False
    exemplars: str = ""

    def answer(self, traces: RequestTraces) -> list[RequestTrace]:
        if self.id:
            return traces.called(kept_name(self.id))
        return [*traces.newest(self.newest), *traces.slowest(self.slowest)]

    def best(self, found: Sequence[RequestTrace]) -> list[RequestTrace]:
        """Return the traces that match best, of those that all processes ``found``."""
        if self.slowest:
            return sorted(found, key=lambda trace: -trace.seconds)[: self.slowest]
        newest = sorted(found, key=lambda trace: -trace.at)
        return newest if self.id else newest[: self.newest]


_traces = msgspec.json.Decoder(list[RequestTrace])
_exemplars = msgspec.json.Decoder(list[KeptExemplar])
_questions = msgspec.json.Decoder(TraceQuestion)


class SharedTraces:
    """The traces and exemplars of this process, which is called ``name``, and those of the other processes.

    ``others`` returns their names. ``frames`` yields the frames of this process's page, one per line, for another
    process that shows a page; ``history`` returns the points of its past.
    """

    def __init__(
        self, traces: RequestTraces, name: str = "", others: Callable[[], Awaitable[Sequence[str]]] | None = None,
        exemplars: Exemplars | None = None,
    ) -> None:  # fmt: skip
        self.own = traces
        self._exemplars = exemplars or Exemplars()
        self._name = name
        self._others = others
        self.frames: Callable[[], AsyncGenerator[bytes]] | None = None
        self.history: Callable[[], Sequence[Any]] | None = None

    @asynccontextmanager
    async def answering(self) -> AsyncGenerator[None]:
        """Answer the other processes while entered."""
        if not self._name:
            yield
            return
        server = await asyncio.start_unix_server(self._answer, _address(self._name), limit=LONGEST_QUESTION)
        try:
            yield
        finally:
            server.close()

    async def find(self, question: TraceQuestion) -> list[RequestTrace]:
        """Return the traces of all processes that match; log and leave out a process that does not answer in time."""
        return question.best([*question.answer(self.own), *await self._of_others(question, _traces)])

    async def exemplars(self) -> list[KeptExemplar]:
        """Return the exemplars of this process and of the other workers of its router."""
        folder = os.environ.get(WORKERS_VARIABLE, "")
        others = await self._of_others(TraceQuestion(exemplars=folder), _exemplars) if folder else []
        return [*self._exemplars.kept(), *others]

    async def others(self) -> Sequence[str]:
        return () if self._others is None else await self._others()

    async def frames_of(self, name: str) -> AsyncGenerator[bytes]:
        """Yield the frames of another process, one per line, until it ends; raise ``OSError`` or ``ValueError``."""
        async with _asked(name, TraceQuestion(watch=True)) as answer:
            while line := await answer.readline():
                yield line

    async def histories(self, decoder: msgspec.json.Decoder[list[T]]) -> list[list[T]]:
        """Return the past points of the other processes, decoded; an empty list for one that does not answer."""
        asked = (self._ask(name, TraceQuestion(history=True), decoder) for name in await self.others())
        return list(await asyncio.gather(*asked))

    async def _of_others(self, question: TraceQuestion, decoder: msgspec.json.Decoder[list[T]]) -> list[T]:
        found = await asyncio.gather(*(self._ask(name, question, decoder) for name in await self.others()))
        return [each for answer in found for each in answer]

    async def _ask(self, name: str, question: TraceQuestion, decoder: msgspec.json.Decoder[list[T]]) -> list[T]:
        try:
            async with asyncio.timeout(ANSWER_SECONDS), _asked(name, question) as answer:
                return decoder.decode(await answer.readline())
        except (OSError, ValueError, TimeoutError, *UNREADABLE) as error:
            logger.warning("traces: another router process does not answer: %s", error or type(error).__name__)
            return []

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, ValueError, TimeoutError, TercetError, *UNREADABLE):
                async with asyncio.timeout(ANSWER_SECONDS):
                    _require_own(writer)
                    question = _questions.decode(await reader.readline())
                    if not question.watch:
                        found: Sequence[Any] = []
                        if question.history:
                            found = [] if self.history is None else self.history()
                        elif not question.exemplars:
                            found = question.answer(self.own)
                        elif question.exemplars == os.environ.get(WORKERS_VARIABLE):
                            found = self._exemplars.kept()
                        writer.write(msgspec.json.encode(found) + b"\n")
                        await writer.drain()
                        return
                if self.frames is None:
                    return
                # Frames go on until this process ends or the other one stops reading.
                async with aclosing(self.frames()) as frames:
                    async for line in frames:
                        writer.write(line)
                        async with asyncio.timeout(ANSWER_SECONDS):
                            await writer.drain()
        finally:
            writer.close()


@asynccontextmanager
async def _asked(name: str, question: TraceQuestion) -> AsyncGenerator[asyncio.StreamReader]:
    """Ask another process, and yield the reader of its answer; raise ``OSError``.

    uvloop, on which routers run, cannot connect to abstract names, but accepts a connected socket.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        sock.connect(_address(name))  # a local connection succeeds or fails at once
        reader, writer = await asyncio.open_unix_connection(sock=sock, limit=LONGEST_ANSWER)
    except BaseException:
        sock.close()
        raise
    try:
        _require_own(writer)
        writer.write(msgspec.json.encode(question) + b"\n")
        yield reader
    finally:
        writer.close()


def _address(name: str) -> str:
    return f"\0tercet-traces-{os.getuid()}-{name}"


def _require_own(writer: asyncio.StreamWriter) -> None:
    """Raise ``PermissionError`` unless the other end is a process of this user: abstract names have no owner."""
    sock: socket.socket = writer.get_extra_info("socket")
    _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    # Root reads every process's memory anyway, so nothing is kept from it.
    if uid not in (os.getuid(), 0):
        raise PermissionError("the process at the other end belongs to another user")
