"""The parser of one streamed answer, without I/O: its input is bytes with their times, its output a reading.

An event has tokens if it has a choice with content. Two events do not count: the first event of a chat, which only
names the role, and an empty last event if the server's token count shows that it has no token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from tercet.protocol.sse import AnswerFailed, AnswerReader, EventTooLong
from tercet.protocol.wire import UNREADABLE
from tercet_lab.bench.results import Failure

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
