"""The streaming client of the two OpenAI endpoints: it sends one request and makes a record of any result.

The parser of a streamed answer has no I/O: its input is bytes with their times. An event has tokens if it has a choice
with content. Two events do not count: the first event of a chat, which only names the role, and an empty last event if
the server's token count shows that it has no token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Annotated, Any, Literal

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from tercet.protocol.sse import AnswerFailed, AnswerReader, EventTooLong
from tercet.protocol.wire import UNREADABLE
from tercet.wire.client.bounded_answers import reason_of
from tercet_lab.bench.results import Failure, RequestRecord

BROKEN_OFF = ("abort", "error")
"""Finish reasons of an answer that the server ended too early."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None

    @property
    def said(self) -> str:
        return self.content or self.reasoning_content or self.reasoning or ("..." if self.tool_calls else "")


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Count = 0
    completion_tokens: Count = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_EVENT = msgspec.json.Decoder(_Event)


class StreamFailed(Exception):
    """The failure of an answer. ``failure`` is its kind, for the record."""

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure: Failure = failure
        self.message = message


@dataclass
class Reading:
    """The answer so far. ``times`` has the time of each event with tokens, in seconds of the caller's clock."""

    times: list[float] = field(default_factory=list[float])
    counts: list[int] = field(default_factory=list[int])
    text: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    done: bool = False
    last_is_silent: bool = False

    @property
    def output_tokens(self) -> int:
        """Number of tokens of the answer: the server's count, else the sum over events, else one per event."""
        return self.completion_tokens or sum(self.counts) or len(self.times)


class StreamReader:
    """A parser that fills a :class:`Reading`. It raises :class:`StreamFailed` for an invalid answer."""

    def __init__(self) -> None:
        self.reading = Reading()
        self._broken_off: str | None = None
        self._events = AnswerReader()

    def feed(self, data: bytes, now: float) -> None:
        """Parse ``data``, which arrived at ``now`` (seconds). Raise :class:`StreamFailed` if it is invalid."""
        try:
            for payload in self._events.events(data):
                self._event(payload, now)
        except EventTooLong as error:
            raise StreamFailed("protocol", error.message) from error
        except AnswerFailed as error:
            raise StreamFailed("server", error.message) from error
        self.reading.done = self._events.done

    def end(self) -> Reading:
        """End the stream and return the reading. Raise :class:`StreamFailed` if it ended too early or was empty."""
        reading = self.reading
        if self._broken_off is not None:
            raise StreamFailed("server", f"the server aborted the answer: finish_reason {self._broken_off}")
        if not reading.done and reading.finish_reason is None:
            if (fault := self._events.fault_at_end()) is not None:
                raise StreamFailed("server", fault)
            raise StreamFailed("disconnected", f"the stream ended after {len(reading.times)} events without [DONE]")
        # The last event of some servers is empty; others put the last token there.
        known = reading.completion_tokens
        if reading.last_is_silent and (not known or len(reading.times) > known) and not reading.counts:
            reading.times.pop()
        if not reading.times:
            raise StreamFailed("empty", "the stream had no token")
        return reading

    def _event(self, payload: bytes, now: float) -> None:
        try:
            if not payload.isascii():
                payload.decode()  # the decoder accepts any bytes in fields that it does not read
            event = _EVENT.decode(payload)
        except UNREADABLE as error:
            raise StreamFailed("protocol", f"an event does not match the API: {error}") from error
        if event.usage is not None:
            self.reading.prompt_tokens = event.usage.prompt_tokens
            self.reading.completion_tokens = event.usage.completion_tokens
        for choice in event.choices:
            if choice.finish_reason in BROKEN_OFF:
                self._broken_off = choice.finish_reason
        if event.choices:
            self._choice(event.choices[0], now)

    def _choice(self, choice: _Choice, now: float) -> None:
        reading = self.reading
        delta = choice.delta
        said = choice.text or "" if delta is None else delta.said
        reading.finish_reason = choice.finish_reason or reading.finish_reason
        if choice.token_ids is not None:
            if not choice.token_ids:
                return
            reading.token_ids += choice.token_ids
            reading.counts.append(len(choice.token_ids))
        elif not said and delta is not None and delta.role and choice.finish_reason is None:
            return
        reading.times.append(now)
        reading.text.append(said)
        reading.last_is_silent = not said and choice.finish_reason is not None


Endpoint = Literal["completions", "chat"]
PromptAs = Literal["tokens", "text"]
Message = dict[str, str]
# Less than the 5 s after which servers commonly close idle connections: a close during a send would look like a
# failure of the server.
KEEPALIVE_SECONDS = 2.0
READ_BUFFER = 1 << 20
ERROR_LENGTH = 300
Clock = time.perf_counter


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampling parameters of every request. ``extra`` is added to the body unchanged."""

    temperature: float = 0.0
    top_p: float | None = None
    ignore_eos: bool = True
    extra: Mapping[str, Any] = {}


def path_of(endpoint: Endpoint) -> str:
    """Return the path of an endpoint under the server's base URL."""
    return "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"


def body_of(
    model: str,
    prompt: Sequence[int] | str | Sequence[Message],
    max_tokens: int,
    sampling: Sampling,
    *,
    chat: bool,
    token_ids: bool = False,
    cache_salt: str | None = None,
) -> bytes:
    """Return the JSON body of a streamed request.

    ``token_ids`` requests the token ids of the answer. ``cache_salt`` keeps the request's prefix from matching those
    of other salts. Both are vLLM's, as is ``ignore_eos``, which is left out if it is false.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages" if chat else "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if sampling.top_p is not None:
        body["top_p"] = sampling.top_p
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if token_ids:
        body["return_token_ids"] = True
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    return msgspec.json.encode(body | dict(sampling.extra))


@dataclass(frozen=True)
class PreparedCall:
    """A request that is ready to send, with the data for its record."""

    index: int
    url: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    planned_input: int = 0
    planned_output: int = 0
    warmup: bool = False
    phase: int = 0
    group: str | None = None


@dataclass(frozen=True)
class CallResult:
    """The record of a request and its answer, which continues the conversation."""

    record: RequestRecord
    reading: Reading


class Client:
    """A client with one connection pool without a limit. Times in records are seconds since ``origin``."""

    def __init__(self, origin: float, request_timeout: float) -> None:
        self.origin = origin
        self._timeout = request_timeout
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS, ttl_dns_cache=3600),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(30.0, self._timeout)),
            auto_decompress=False,
            headers={"content-type": "application/json", "accept-encoding": "identity"},
            read_bufsize=READ_BUFFER,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def now(self) -> float:
        """Return the seconds since the origin."""
        return Clock() - self.origin

    async def send(self, call: PreparedCall, scheduled: float) -> CallResult:
        """Send ``call`` and read its answer to the end. A failure of the target is in the record, and raises no error.

        A cancellation ends the request and returns a record of the interruption.
        """
        sent = self.now()
        reader = StreamReader()
        status: int | None = None
        failure: Failure | None = None
        error: str | None = None
        try:
            async with asyncio.timeout(self._timeout):
                status = await self._read(call, reader)
        except StreamFailed as failed:
            failure, error = failed.failure, failed.message
            status = failed.status if isinstance(failed, _HTTPFailed) else status
        except TimeoutError:
            failure, error = "timeout", f"the answer did not end within {self._timeout:g} s"
        except (aiohttp.ClientError, HttpProcessingError, OSError) as problem:
            failure = "refused" if isinstance(problem, aiohttp.ClientConnectorError) else "disconnected"
            error = reason_of(problem)
        except asyncio.CancelledError:
            failure, error = "interrupted", "the run was interrupted"
        record = self._record(call, scheduled, sent, reader.reading, failure, _one_line(error), status)
        return CallResult(record, reader.reading)

    def never_sent(self, call: PreparedCall, scheduled: float) -> CallResult:
        """Return the record of a request that still waited for a slot when the run was interrupted."""
        reading = Reading()
        why = "the run was interrupted before it was sent"
        return CallResult(self._record(call, scheduled, self.now(), reading, "interrupted", why, None), reading)

    async def _read(self, call: PreparedCall, reader: StreamReader) -> int:
        if self._session is None:
            raise RuntimeError("the client is used outside its async context; enter it first")
        async with self._session.post(call.url, data=call.body, headers=call.headers) as response:
            if response.status != 200:
                raise _HTTPFailed(response.status, await _complaint(response))
            feed, origin = reader.feed, self.origin
            async for data in response.content.iter_any():
                feed(data, Clock() - origin)
            reader.end()
            return response.status

    def _record(
        self, call: PreparedCall, scheduled: float, sent: float, reading: Reading, failure: Failure | None,
        error: str | None, status: int | None,
    ) -> RequestRecord:  # fmt: skip
        times = reading.times
        one_each = all(count == 1 for count in reading.counts)
        return RequestRecord(
            index=call.index,
            scheduled=scheduled,
            sent=sent,
            end=times[-1] if times and failure is None else self.now(),
            first_token=times[0] if times else None,
            token_times=tuple(times),
            token_counts=() if one_each else tuple(reading.counts),
            input_tokens=reading.prompt_tokens or call.planned_input,
            output_tokens=reading.output_tokens,
            planned_input=call.planned_input,
            planned_output=call.planned_output,
            failure=failure,
            error=error,
            status=status,
            finish_reason=reading.finish_reason,
            warmup=call.warmup,
            phase=call.phase,
            group=call.group,
        )


class _HTTPFailed(StreamFailed):
    """The failure of an answer whose status is not 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__("http", f"HTTP {status}: {message}")
        self.status = status


async def _complaint(response: aiohttp.ClientResponse) -> str:
    """Return the server's explanation: the message of an OpenAI error, or the text of the answer."""
    body = await response.read()
    text = body.decode(errors="replace").strip()
    try:
        error = msgspec.json.decode(body, type=dict[str, object]).get("error")
        if isinstance(error, dict):
            return str(error.get("message", text))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    except UNREADABLE:
        return text or str(response.reason)
    return text


def _one_line(text: str | None) -> str | None:
    """Return the text on one line, limited in length: parts of it come from the server."""
    return None if text is None else " ".join(text.encode(errors="replace").decode().split())[:ERROR_LENGTH]
