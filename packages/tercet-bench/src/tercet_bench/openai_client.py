"""The streaming client of OpenAI's completions: it sends one request and makes a record of any result.

An answer is read without I/O: bytes with their times. An event has tokens if it has a choice; an empty last event does
not count if the server's token count shows that it has no token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from tercet.protocol.sse import AnswerFailed, AnswerReader, EventTooLong
from tercet.protocol.wire import UNREADABLE
from tercet.wire.client.bounded_answers import reason_of
from tercet_lab.tables import Failure, RequestRow

COMPLETIONS = "/v1/completions"
BROKEN_OFF = ("abort", "error")
"""Finish reasons of an answer that the server ended too early."""
# Less than the 5 s after which servers commonly close idle connections: a close during a send would look like a
# failure of the server.
KEEPALIVE_SECONDS = 2.0
READ_BUFFER = 1 << 20
ERROR_LENGTH = 300
Clock = time.perf_counter
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Choice(msgspec.Struct):
    text: str | None = None
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
    """The failure of an answer. ``failure`` is its kind, for the record; ``status`` that of an HTTP error."""

    def __init__(self, failure: Failure, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.failure: Failure = failure
        self.message = message
        self.status = status


class Reading:
    """The answer so far. ``times`` has the time of each event with tokens, in seconds of the caller's clock."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.usage = _Usage()
        self.finish_reason: str | None = None
        self._broken_off: str | None = None
        self._last_is_silent = False
        self._events = AnswerReader()

    @property
    def output_tokens(self) -> int:
        """Number of tokens of the answer: the server's count, else the sum over events, else one per event."""
        return self.usage.completion_tokens or sum(self.counts) or len(self.times)

    def feed(self, data: bytes, now: float) -> None:
        """Read ``data``, which arrived at ``now`` (seconds). Raise :class:`StreamFailed` if it is invalid."""
        try:
            for payload in self._events.events(data):
                self._event(payload, now)
        except EventTooLong as error:
            raise StreamFailed("protocol", error.message) from error
        except AnswerFailed as error:
            raise StreamFailed("server", error.message) from error

    def end(self) -> Reading:
        """End the stream and return this reading. Raise :class:`StreamFailed` if it ended too early or was empty."""
        if self._broken_off is not None:
            raise StreamFailed("server", f"the server aborted the answer: finish_reason {self._broken_off}")
        if not self._events.done and self.finish_reason is None:
            if (fault := self._events.fault_at_end()) is not None:
                raise StreamFailed("server", fault)
            raise StreamFailed("disconnected", f"the stream ended after {len(self.times)} events without [DONE]")
        # The last event of some servers is empty; others put the last token there.
        known = self.usage.completion_tokens
        if self._last_is_silent and (not known or len(self.times) > known) and not self.counts:
            self.times.pop()
        if not self.times:
            raise StreamFailed("empty", "the stream had no token")
        return self

    def _event(self, payload: bytes, now: float) -> None:
        try:
            if not payload.isascii():
                payload.decode()  # the decoder accepts any bytes in fields that it does not read
            event = _EVENT.decode(payload)
        except UNREADABLE as error:
            raise StreamFailed("protocol", f"an event does not match the API: {error}") from error
        self.usage = event.usage or self.usage
        for choice in event.choices:
            if choice.finish_reason in BROKEN_OFF:
                self._broken_off = choice.finish_reason
        for choice in event.choices[:1]:
            self.finish_reason = choice.finish_reason or self.finish_reason
            if choice.token_ids is not None:
                if not choice.token_ids:
                    return
                self.token_ids += choice.token_ids
                self.counts.append(len(choice.token_ids))
            self.times.append(now)
            self.text.append(choice.text or "")
            self._last_is_silent = not choice.text and choice.finish_reason is not None


def body_of(
    model: str, prompt: Sequence[int] | str, max_tokens: int, *, ignore_eos: bool = True, token_ids: bool = False,
    cache_salt: str | None = None, extra: Mapping[str, Any] | None = None,
) -> bytes:  # fmt: skip
    """Return the JSON body of a streamed request, with the fields of ``extra``.

    ``token_ids`` requests the token ids of the answer. ``cache_salt`` keeps the request's prefix from matching those
    of other salts. Both are vLLM's, as is ``ignore_eos``, and are left out if they are not set.
    """
    body: dict[str, Any] = {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    body |= {"ignore_eos": True} if ignore_eos else {}
    body |= {"return_token_ids": True} if token_ids else {}
    body |= {} if cache_salt is None else {"cache_salt": cache_salt}
    return msgspec.json.encode(body | dict(extra or {}))


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

    def record(self, scheduled: float, sent: float, end: float, **more: Any) -> RequestRow:
        """Return the request's record; ``more`` are what is known of its answer."""
        return RequestRow(
            id=self.index, scheduled=scheduled, sent=sent, ended=end, planned_input=self.planned_input,
            wanted_tokens=self.planned_output, warmup=self.warmup, phase=self.phase, session=self.group, **more,
        )  # fmt: skip


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

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    def now(self) -> float:
        """Return the seconds since the origin."""
        return Clock() - self.origin

    async def send(self, call: PreparedCall, scheduled: float) -> tuple[RequestRow, Reading]:
        """Send ``call`` and read its answer to the end. A failure of the target is in the record, and raises no error.

        A cancellation ends the request and returns a record of the interruption.
        """
        sent, reading = self.now(), Reading()
        status: int | None = None
        failure: Failure | None = None
        error = ""
        try:
            async with asyncio.timeout(self._timeout):
                status = await self._read(call, reading)
        except StreamFailed as failed:
            failure, error, status = failed.failure, failed.message, failed.status
        except TimeoutError:
            failure, error = "timeout", f"the answer did not end within {self._timeout:g} s"
        except (aiohttp.ClientError, HttpProcessingError, OSError) as problem:
            failure = "refused" if isinstance(problem, aiohttp.ClientConnectorError) else "disconnected"
            error = reason_of(problem)
        except asyncio.CancelledError:
            failure, error = "interrupted", "the run was interrupted"
        # On one line, limited in length: parts of it come from the server.
        reason = " ".join(error.encode(errors="replace").decode().split())[:ERROR_LENGTH]
        times = reading.times
        record = call.record(
            scheduled,
            sent,
            times[-1] if times and failure is None else self.now(),
            first_token=times[0] if times else None,
            token_times=tuple(times),
            token_counts=() if all(count == 1 for count in reading.counts) else tuple(reading.counts),
            input_tokens=reading.usage.prompt_tokens or call.planned_input,
            output_tokens=reading.output_tokens,
            failure=failure,
            error=None if failure is None else reason,
            status=status,
            finish_reason=reading.finish_reason,
        )
        return record, reading

    async def _read(self, call: PreparedCall, reading: Reading) -> int:
        if self._session is None:
            raise RuntimeError("the client is used outside its async context; enter it first")
        async with self._session.post(call.url, data=call.body, headers=call.headers) as response:
            if response.status != 200:
                raise StreamFailed("http", f"HTTP {response.status}: {await _complaint(response)}", response.status)
            feed, origin = reading.feed, self.origin
            async for data in response.content.iter_any():
                feed(data, Clock() - origin)
            reading.end()
            return response.status


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
