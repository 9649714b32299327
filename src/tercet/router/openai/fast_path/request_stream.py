"""The fast path: streams of requests, from the socket through vLLM's parts and back, without the layers between them.

:class:`FastPath` takes a request and has vLLM's serving object prepare it (:mod:`.preparing`). A request without a plan
goes to vLLM's layers unchanged: they answer it, in most cases with an error. :class:`RequestStream` has its choices,
and the events and limits that they share.

The chunks of a choice go from its program's outputs straight to the socket. vLLM's output processor makes the text of
the first and the last output, and updates vLLM's counters. The outputs between them are written when they arrive,
without waking up a task.

Relies on ``AsyncLLM.add_request`` validating a request, registering it with the ``OutputProcessor`` and passing its
sequences to the engine-core client, with one queue for all of them; on ``process_outputs`` putting the result of an
output into the request's queue at once; on ``RequestState`` having ``detokenizer``, ``logprobs_processor``,
``stream_interval``, ``request_index`` and ``stats``; on serving objects' ``_raise_if_error``; on the text of
``SSE_KEEP_ALIVE_COMMENT``; and on the updates of ``IterationStats.update_from_output`` for a token after the first: the
request's token count and time of last token, the gap between the two, and the iteration's token count. Also on
``PrometheusInstrumentatorMiddleware``, ``CORSMiddleware`` and ``XRequestIdMiddleware`` being among the application's
layers, each with the next one as ``app``; on the ``instrumentations`` of the first one taking the data of a request as
one ``Info``; and on the other two changing only the headers of an answer.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec.structs import replace
from prometheus_fastapi_instrumentator.metrics import Info
from prometheus_fastapi_instrumentator.middleware import PrometheusInstrumentatorMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.serve.middleware.x_request_id import XRequestIdMiddleware
from vllm.entrypoints.serve.utils.sse_keep_alive import SSE_KEEP_ALIVE_COMMENT
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMClientError
from vllm.outputs import RequestOutput
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import IterationStats, RequestStateStats

from tercet.protocol import Output, ProgramFailed
from tercet.protocol.headers import TRACE_HEADER
from tercet.protocol.wire import JSON
from tercet.router.openai.fast_path.parsed_text import ParsedDeltas, Parsing, Passed
from tercet.router.openai.fast_path.sse_chunks import NULL, Extras, counts_reasoning, encode, framed, usage_of
from tercet.router.openai.fast_path.token_texts import LogprobChunks, Logprobs, TokenPieces, TokenTexts, look_up
from tercet.router.openai.program_client import SequenceFailed, SequenceOutputs
from tercet.vllm_plugin.differences import SILENT_ENDS
from tercet.wire.serving.client_connection import CONNECTION, ClientConnection
from tercet.wire.serving.server_access import RequestContext

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import OutputProcessor

    from tercet.router.openai.fast_path.sse_chunks import AnswerEvents

logger = logging.getLogger(__name__)
COMMENT = framed(SSE_KEEP_ALIVE_COMMENT.encode())
# Length in seconds of one "iteration" in vLLM's metrics. One record costs as much as several tokens.
RECORD_SECONDS = 0.5
# Key of the scope with the function that streams the answer and returns its last events.
STREAM = "tercet.stream"
EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
# What the HTTP metrics get as the response; they read its headers only.
STREAMED = Response()
# What adds a prepared request to vLLM, and what yields that in place of the request's results.
AddRequest = Callable[[], Awaitable[Any]]
Adding = AsyncGenerator[AddRequest, None]


class FastPath:
    """Serves the streams of ``routes`` (by path) of ``app``, whose layers add headers to answers."""

    def __init__(self, app: Any, routes: dict[str, FastRoute], tools: StreamTools, metrics: HttpMetrics) -> None:
        self._routes = routes
        self._tools = tools
        self._metrics = metrics
        # The application's layers that add headers to answers, in their order, around the stream.
        self._answer: ASGIApp = _stream_answer
        for layer in reversed([*_layers(app)]):
            if not isinstance(layer, (CORSMiddleware, XRequestIdMiddleware)):
                continue
            outer: Any = copy.copy(layer)  # vLLM's own path goes on using the layer itself
            outer.app = self._answer
            self._answer = outer

    async def serve(self, context: RequestContext, scope: Scope, send: Send) -> bool:
        """Serve the current request if this path supports it; return False if it does not."""
        route, connection = self._routes.get(context.path), context.connection
        if route is None or connection is None or context.asked.stream is not True:
            return False
        # Frames are written in HTTP/1.1's chunked encoding; vLLM reads no body without a content type; and a trace is
        # added to an answer by a layer that vLLM's path has around it.
        is_json = context.form == JSON and "content-type" in context.headers
        if scope["http_version"] != "1.1" or not is_json or TRACE_HEADER in context.headers:
            return False
        try:
            request = route.model.model_validate(context.fields)
            plan = await route.prepare(request, Request(scope)) if route.takes(request) else None
            if not isinstance(plan, StreamPlan):  # vLLM has refused the request: its own path answers it
                return False
            (add_request,) = [each async for each in plan.adding]
        except Exception as error:  # vLLM's own path answers the request, whatever the error is
            logger.debug("the stream takes vLLM's own path: %s: %s", type(error).__name__, error)
            return False
        context.fields = None  # they may be large, and nothing reads them from here on
        stream = RequestStream(connection, self._tools, plan, context.concurrency)
        # The run calls ``add_request``, vLLM's, which passes each sequence to ``ProgramClient.add_request_async``. That
        # finds ``begin_stream`` in the request's context, calls it with the sequence's outputs, and starts no task.
        context.begin_stream = stream.begin
        scope[STREAM] = partial(stream.run, add_request)
        try:
            await self._answer(scope, _disconnect, send)
        finally:  # as vLLM's layer does; the answer of a client that left counts by its head, too
            self._metrics.observe(scope, context.path, time.monotonic() - context.began)
        context.calls_tool = stream.calls_tool
        return True


def _layers(app: Any) -> Iterator[Any]:
    """Yield an application's layers, the outermost first."""
    while app is not None:
        yield app
        app = getattr(app, "app", None)


async def _stream_answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the stream of ``scope``: an ASGI application."""
    connection: ClientConnection = scope[CONNECTION]
    run: Callable[[], Awaitable[bytes]] = scope[STREAM]
    # The head by ASGI, so that the layers add their headers to it; the chunks past them, to the connection.
    with connection.until_lost():
        await send({"type": "http.response.start", "status": 200, "headers": [EVENT_STREAM]})
        end = await run()
        connection.flush()
        await send({"type": "http.response.body", "body": end})


async def _disconnect() -> Message:
    """Return what ASGI's ``receive`` returns for a request whose body was read."""
    return {"type": "http.disconnect"}


class HttpMetrics:
    """Counter of requests and their durations, in the metrics of ``app``'s layers; no ``observers``: it has none."""

    def __init__(self, app: Any) -> None:
        self.observers: Sequence[Callable[[Info], None]] = ()
        for layer in _layers(app):
            if isinstance(layer, PrometheusInstrumentatorMiddleware):
                self.observers = layer.instrumentations

    def observe(self, scope: Scope, handler: str, seconds: float) -> None:
        info = Info(Request(scope), STREAMED, "POST", handler, "2xx", seconds, seconds)
        for observe in self.observers:
            observe(info)


@dataclass(frozen=True)
class FastRoute:
    """One route: the ``model`` of its bodies, a test of a body (``takes``), and a function that prepares its stream."""

    model: Any
    takes: Callable[[Any], bool]
    prepare: Callable[[Any, Request], Awaitable[Any]]


@dataclass(frozen=True)
class StreamTools:
    """What all streams of a process share."""

    processor: OutputProcessor
    stats: StreamStats
    texts: TokenTexts | None
    #: Seconds without a chunk after which a comment is sent; 0: never.
    keep_alive: float
    #: None without a tokenizer.
    pieces: TokenPieces | None


@dataclass(frozen=True)
class StreamPlan:
    """One answer before it is streamed: ``serving``, vLLM's object, prepared it, and ``events`` write it."""

    serving: Any
    events: AnswerEvents
    adding: Adding
    #: A parser may read its text.
    is_chat: bool
    n: int = 1
    #: What the client asked for in each chunk.
    usage_each: bool = False
    token_ids: bool = False
    logprobs: Logprobs | None = None
    parsing: Parsing | None = None
    #: The system's, in the last chunk.
    fingerprint: str | None = None
    #: An output without text and tokens is handled like any other, even if it is the first.
    emits_empty_outputs: bool = False

    @property
    def is_plain(self) -> bool:
        """True if the events differ only in their text."""
        return not (self.usage_each or self.token_ids) and self.logprobs is None and self.parsing is None


class TextEnded(Exception):
    """Raised if the choice ends before its program does: at a stop string, or by an error of vLLM's layer."""


class ChoiceStream:
    """Stream of one sequence of a request: writes ``outputs`` to ``answer``. :meth:`run` returns at its end."""

    def __init__(self, answer: RequestStream, outputs: SequenceOutputs) -> None:
        self._answer, self._outputs = answer, outputs
        tools, plan = self._tools, self._plan = answer.tools, answer.plan
        self._state: Any = tools.processor.request_states[outputs.request_id]
        self._events = plan.events.choice(self._state.request_index)
        # None: no parser reads the text.
        self.parsed = None if plan.parsing is None else ParsedDeltas(plan.parsing)
        self._logprobs: LogprobChunks | None = None
        if plan.logprobs is not None:
            self._logprobs = LogprobChunks(
                plan.logprobs, self._state.logprobs_processor, plan.serving, tools.pieces, tools.processor.tokenizer,
                is_chat=plan.is_chat,
            )  # fmt: skip
        # Chunks that hide the reasoning also hide its token ids and log probabilities.
        self._hides = plan.parsing is not None and plan.parsing.hides_reasoning
        self._sends_ids = plan.token_ids and not self._hides
        self._has_extras = self._sends_ids or plan.usage_each
        detokenizer = self._state.detokenizer
        decode_next = look_up(detokenizer, tools.texts, self._state.prompt_token_ids or ())
        # Returns the text of the next token if the detokenizer does nothing else with it.
        self._decode_next: Callable[[int], str] | None = None if detokenizer.stop else decode_next
        # What writes outputs between the first and the last; None if vLLM's processor makes their text:
        # 1. It makes one result of several outputs (stream interval).
        # 2. The events differ only in their text: the shortest way, which knows stop strings.
        # 3. Other events before a possible stop string: only vLLM knows which of their tokens remain.
        # 4. Only a parser's deltas, or deltas with further fields.
        self._write_more: Callable[[Output], EngineCoreOutput | None] | None = None
        if self._state.stream_interval <= 1:
            if plan.is_plain:
                self._write_more = self._write_text
            elif detokenizer.stop or (self._logprobs is not None and not self._logprobs.is_direct):
                pass
            elif self.parsed is not None and self._logprobs is None and not self._has_extras:
                self._write_more = partial(self._write_parsed, self.parsed)
            else:
                self._write_more = self._write_chunk
        # ``_is_flowing``: outputs between the first and the last are written here. ``_is_finished``: vLLM has made the
        # last result.
        self._is_flowing = self._is_finished = False
        self._prompt_was_sent = False
        self._failure: Exception | None = None
        # The log probabilities of the result that vLLM makes next; None if vLLM makes them too.
        self._written: bytes | None = None
        self.num_tokens = 0

    @property
    def reasoning_tokens(self) -> int:
        """The number of output tokens that were reasoning; 0 if they are not counted."""
        return 0 if self.parsed is None else self.parsed.reasoning_tokens

    async def run(self, turn: AbstractAsyncContextManager[None]) -> None:
        """Stream the sequence while ``turn`` is entered. Raises the errors that end the whole answer."""
        try:
            with self._outputs.failures():
                async with turn:
                    with suppress(TextEnded):
                        await self._outputs.stream.run(self._consume, self._answer.sent)
                        if not self._is_finished:
                            raise ProgramFailed("the program ended before its sequence did")
        finally:
            if self.parsed is not None:
                self.parsed.end()
        if self._failure is not None:
            raise self._failure

    def _consume(self, output: Output) -> None:
        """Write an output as soon as it arrives. Raises :class:`TextEnded` if the choice needs no more outputs."""
        write = self._write_more if output.token_ids else None
        if not (output.logprobs is None if self._logprobs is None else self._logprobs.takes(output)):
            write = None
        if write is None:
            left = self._outputs.to_core_output(output)
        elif self._is_flowing and output.finish_reason is None:
            left = write(output)
        else:
            if self._logprobs is not None:  # they are written for the chunk, and vLLM makes the result of the rest
                try:
                    self._written = self._logprobs.of_output(output)
                except Exception as error:
                    self._fail(error)
                output = replace(output, logprobs=None)
            left = self._outputs.to_core_output(output)
        if left is not None:
            self._process(left)
            if self._is_finished and output.finish_reason is None:
                raise TextEnded

    def _process(self, output: EngineCoreOutput) -> None:
        """Pass an output to vLLM's processor, and send its result before the program continues."""
        self._tools.processor.process_outputs([output], time.monotonic(), self._tools.stats.iteration())
        # At once, in this task: vLLM's output handler would be one more task switch for each token.
        result = self._answer.queue.get_nowait()
        if result is not None:
            try:
                self._write_result(result)
            except GenerationError:
                raise
            except Exception as error:
                self._fail(error)
            self._answer.flush()

    def _fail(self, error: Exception) -> NoReturn:
        self._failure = error
        raise TextEnded from error

    def _write_text(self, output: Output) -> EngineCoreOutput | None:
        """Send the text of an output's tokens; return the end of the choice instead if they complete a stop string."""
        token_ids = output.token_ids
        num_tokens = len(token_ids)
        if self._decode_next is not None:
            self.num_tokens += num_tokens
            text = "".join(map(self._decode_next, token_ids))
        else:
            detokenizer = self._state.detokenizer
            before = detokenizer.num_output_tokens()
            stop = detokenizer.update(list(token_ids), False)
            # A stop string inside several tokens of one step drops the tokens after it.
            self.num_tokens += detokenizer.num_output_tokens() - before
            if stop is not None:  # the text before it belongs to the last chunk
                self._tools.stats.count(self._state.stats, num_tokens)
                return EngineCoreOutput(
                    self._state.request_id, new_token_ids=[], finish_reason=FinishReason.STOP, stop_reason=stop
                )
            text = detokenizer.get_next_output_text(False, True)
        self._tools.stats.observe(self._state.stats, num_tokens)
        if frame := self._events.text(text):
            self._answer.write(frame)
        return None

    def _write_chunk(self, output: Output) -> EngineCoreOutput | None:
        """Send the text of an output with the other fields that the client asked for; stop strings are not checked."""
        token_ids = list(output.token_ids)
        self.num_tokens += len(token_ids)
        self._tools.stats.observe(self._state.stats, len(token_ids))
        try:
            logprobs = None if self._logprobs is None else self._logprobs.of_output(output)
            self._write_event(self._text_of(token_ids), token_ids, logprobs)
        except Exception as error:  # mostly a parser's error; vLLM turns it into the client's error
            self._fail(error)
        return None

    def _write_parsed(self, parsed: ParsedDeltas, output: Output) -> EngineCoreOutput | None:
        """Send the parser's delta for an output, without other fields; stop strings are not checked."""
        token_ids = list(output.token_ids)
        self.num_tokens += len(token_ids)
        self._tools.stats.observe(self._state.stats, len(token_ids))
        try:
            text = self._text_of(token_ids)
            if (passed := parsed.passes(text, token_ids)) is Passed.CONTENT:
                frame = self._events.text(text)
            else:
                delta = self._parsed_delta(parsed, passed, text, token_ids)
                frame = b"" if delta is None else self._events.frame(delta)
        except Exception as error:
            self._fail(error)
        if frame:
            self._answer.write(frame)
        return None

    def _text_of(self, token_ids: list[int]) -> str:
        if self._decode_next is not None:
            return "".join(map(self._decode_next, token_ids))
        detokenizer = self._state.detokenizer
        detokenizer.update(token_ids, False)
        return detokenizer.get_next_output_text(False, True)

    def _write_event(self, text: str, token_ids: list[int], logprobs: bytes | None, prompt: bytes = NULL) -> None:
        """Send the event of a text and the other fields that the client asked for, unless it would be empty."""
        delta = self._delta_of(text, token_ids)
        shown = NULL if logprobs is None or self._hides else logprobs
        if delta is None:
            if shown is NULL and not self._sends_ids:
                return
            delta = self._events.empty
        if prompt is NULL and not self._has_extras:
            if frame := self._events.frame(delta, shown):
                self._answer.write(frame)
            return
        self._answer.write(framed(self._events.event(delta, self._extras(token_ids, shown, prompt))))

    def _delta_of(self, text: str, token_ids: list[int], *, finished: bool = False) -> bytes | None:
        """Return the delta of a text; None if the parser makes none of it."""
        parsed = self.parsed
        if parsed is None:
            return self._events.text_delta(text)
        passed = None if finished else parsed.passes(text, token_ids)
        return self._parsed_delta(parsed, passed, text, token_ids, finished=finished)

    def _parsed_delta(
        self, parsed: ParsedDeltas, passed: Passed | None, text: str, token_ids: list[int], *, finished: bool = False
    ) -> bytes | None:
        match passed:
            case Passed.CONTENT:
                return self._events.text_delta(text)
            case Passed.REASONING:
                return self._events.reasoning_delta(text)
            case Passed.ARGUMENTS:
                return self._events.arguments_delta(parsed.call, text)
            case None:
                delta = parsed.read(text, token_ids, self._state.prompt_token_ids, finished=finished)
                return None if delta is None else self._events.parsed_delta(delta)

    def _extras(self, token_ids: Sequence[int], logprobs: bytes, prompt: bytes) -> Extras:
        plan, usage = self._plan, b""
        if plan.usage_each:
            reasoning = self.reasoning_tokens if plan.is_chat and counts_reasoning(plan.serving) else None
            prompt_tokens = len(self._state.prompt_token_ids or ())
            usage = usage_of(prompt_tokens, self.num_tokens, reasoning, is_chat=plan.is_chat)
        return Extras(logprobs, encode(token_ids) if self._sends_ids else NULL, prompt, usage)

    def _write_result(self, result: RequestOutput) -> None:
        """Send the chunk of a result; the last chunk is given to the answer instead."""
        plan, completion = self._plan, result.outputs[0]
        if before := plan.events.result(result):  # events that come before the result's own
            self._answer.write(framed(before))
        plan.serving._raise_if_error(completion.finish_reason, self._state.request_id)
        self._is_flowing = True
        self._is_finished = completion.finish_reason is not None
        prompt, logprobs = NULL, None
        if plan.token_ids and not plan.is_chat and not self._prompt_was_sent:
            self._prompt_was_sent = True
            prompt = encode(self._state.prompt_token_ids)
        # As vLLM does: a chat answer's are made even if no event follows.
        if plan.is_chat:
            logprobs = self._logprobs_of(completion)
        # Neither this result nor an earlier one has a token or text.
        is_empty = not (completion.text or completion.token_ids or self.num_tokens or plan.emits_empty_outputs)
        if is_empty and (not self._is_finished or SILENT_ENDS.is_here):
            return
        if not plan.is_chat:
            logprobs = self._logprobs_of(completion)
        token_ids = list(completion.token_ids)
        self.num_tokens += len(token_ids)
        reason = completion.finish_reason
        if reason is None:
            self._write_event(completion.text, token_ids, logprobs, prompt)
            return
        reads = not (plan.is_chat and is_empty)  # the parser does not read an empty result
        delta = self._delta_of(completion.text, token_ids, finished=True) if reads else None
        if self.parsed is not None:
            reason = self.parsed.finish_reason(reason)
        extras = self._extras(token_ids, NULL if logprobs is None or self._hides else logprobs, prompt)
        self._answer.has_ended(
            self._events.last(delta or self._events.empty, reason, completion.stop_reason, plan.fingerprint, extras)
        )

    def _logprobs_of(self, completion: Any) -> bytes | None:
        written, self._written = self._written, None
        return self._logprobs.of_result(completion) if written is None and self._logprobs is not None else written


class KeepAlive:
    """Passes frames to ``write``, and writes a comment after ``interval`` seconds without a frame, for proxies."""

    def __init__(self, write: Callable[[bytes], None], interval: float) -> None:
        self._write = write
        self._interval = interval
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def write(self, frame: bytes) -> None:
        self._last = asyncio.get_running_loop().time()
        self._write(frame)

    @contextmanager
    def running(self) -> Generator[None]:
        self._last = asyncio.get_running_loop().time()
        self._look()
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() >= self._last + self._interval:
            self.write(COMMENT)
        self._timer = loop.call_at(self._last + self._interval, self._look)


class RequestStream:
    """The stream of one request, sent to ``connection``; ``concurrency`` limits how many sequences run at a time."""

    def __init__(
        self, connection: ClientConnection, tools: StreamTools, plan: StreamPlan,
        concurrency: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:  # fmt: skip
        self._connection = connection
        self.tools, self.plan = tools, plan
        self._concurrency = concurrency
        keeps_alive = tools.keep_alive and plan.events.keeps_alive
        self._keep_alive = KeepAlive(connection.write, tools.keep_alive) if keeps_alive else None
        self.write = connection.write if self._keep_alive is None else self._keep_alive.write
        self.flush = connection.flush
        self._choices: list[ChoiceStream] = []
        self._open, self._end = plan.n, b""
        self.queue: Any = None

    async def run(self, add_request: AddRequest) -> bytes:
        """Stream the request that ``add_request`` adds to vLLM; return the last events, with the error if it failed."""
        events = self.plan.events
        if opening := events.begin():
            self.write(framed(opening))
        try:
            self.queue = await add_request()
            with nullcontext() if self._keep_alive is None else self._keep_alive.running():
                await self._stream()
            return self._end + await events.end(self._choices)
        except Exception as error:
            if not isinstance(error, (VLLMClientError, GracefulHTTPError, GenerationError, SequenceFailed)):
                logger.exception("a stream failed")
            return events.failed(error)

    def begin(self, outputs: SequenceOutputs) -> None:
        """Add a sequence with these ``outputs``; the engine-core client calls it while vLLM adds the request."""
        self._choices.append(ChoiceStream(self, outputs))

    async def _stream(self) -> None:
        if not self._choices:
            raise RuntimeError("vLLM added a request without passing it to its engine-core client")
        try:
            if len(self._choices) == 1:
                await self._choices[0].run(nullcontext())
                return
            # All choices at the same time; an error of one choice ends all of them.
            async with asyncio.TaskGroup() as group:
                for choice in self._choices:
                    group.create_task(choice.run(self._concurrency()))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    @property
    def calls_tool(self) -> bool:
        return any(choice.parsed is not None and choice.parsed.has_tool_calls for choice in self._choices)

    async def sent(self) -> None:
        """Send the written chunks, and wait until the client has read enough."""
        self._connection.flush()
        await self._connection.has_room()

    def has_ended(self, last: bytes) -> None:
        """Write a choice's ``last`` event; the last choice's one is kept for the end of the stream."""
        self._open -= 1
        if self._open:
            self.write(framed(last))
        else:
            self._end = last


class StreamStats:
    """Token statistics, passed to vLLM's loggers every ``RECORD_SECONDS``; without loggers, nothing is recorded."""

    def __init__(self, loggers: Any | None) -> None:
        self._loggers = loggers
        self._iteration: IterationStats | None = None

    def iteration(self) -> IterationStats | None:
        """Return the object in which vLLM's own path records now; None without loggers."""
        if self._loggers is None:
            return None
        gathered = self._gather(0)
        gathered.iteration_timestamp = time.time()  # the end of the latencies that vLLM measures
        return gathered

    def observe(self, request: RequestStateStats | None, num_tokens: int) -> None:
        """Record one output with ``num_tokens`` more tokens of a request."""
        if self._loggers is None or request is None:
            return
        now = time.monotonic()
        if (gathered := self._iteration) is None:
            gathered = self._gather(0)
        gathered.num_generation_tokens += num_tokens
        gathered.inter_token_latencies_iter.append(now - request.last_token_ts)
        request.last_token_ts = now
        request.num_generation_tokens += num_tokens

    def count(self, request: RequestStateStats | None, num_tokens: int) -> None:
        """Count ``num_tokens`` more tokens of a request; vLLM's own path records the latency of their output."""
        if self._loggers is not None and request is not None:
            self._gather(num_tokens)
            request.num_generation_tokens += num_tokens

    def record(self) -> None:
        gathered, self._iteration = self._iteration, None
        if gathered is not None and self._loggers is not None:
            self._loggers.record(scheduler_stats=None, iteration_stats=gathered)

    def _gather(self, num_tokens: int) -> IterationStats:
        if self._iteration is None:
            self._iteration = IterationStats()
            asyncio.get_running_loop().call_later(RECORD_SECONDS, self.record)
        self._iteration.num_generation_tokens += num_tokens
        return self._iteration
