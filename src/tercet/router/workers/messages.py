"""What a supervisor and its workers say to each other, over a socket pair for each worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec

from tercet.streams.frames import Splitter
from tercet.streams.messages import LENGTH_BYTES

LONGEST, CHUNK = 64 * 1024 * 1024, 64 * 1024
T = TypeVar("T")


class Call(msgspec.Struct, frozen=True):
    """A request to the front door's own routes."""

    method: str
    path: str
    body: bytes = b""

    @property
    def changes(self) -> bool:
        """Whether it asks for a change, and not for an answer only."""
        return self.method not in ("GET", "HEAD", "OPTIONS")


class Reply(msgspec.Struct, frozen=True):
    """The answer to it, in JSON."""

    status: int
    body: bytes

    @property
    def is_error(self) -> bool:
        """Whether nothing was changed."""
        return self.status >= 400


class Wish(msgspec.Struct, frozen=True, tag=True):
    """A worker was asked something that concerns all; ``number`` is its own."""

    number: int
    call: Call


class Granted(msgspec.Struct, frozen=True, tag=True):
    """The replies to a worker's wish, its own first; one alone if that is an error."""

    number: int
    replies: list[Reply]


class Perform(msgspec.Struct, frozen=True, tag=True):
    """A worker shall answer a call; ``number`` is the supervisor's."""

    number: int
    call: Call


class Performed(msgspec.Struct, frozen=True, tag=True):
    """A worker's reply to a call."""

    number: int
    reply: Reply


class Serving(msgspec.Struct, frozen=True, tag=True):
    """A worker's application can answer calls; it accepts connections once it was told :class:`Open`."""


class Open(msgspec.Struct, frozen=True, tag=True):
    """The worker knows of every change there was."""


ToSupervisor = Wish | Performed | Serving
ToWorker = Granted | Perform | Open


def write(writer: asyncio.StreamWriter, message: ToSupervisor | ToWorker) -> None:
    """Send one message, framed as token streams are."""
    body = msgspec.msgpack.encode(message)
    writer.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)


async def messages_of(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T]) -> AsyncIterator[T]:
    """Message after message, until the other side is gone.

    Raises :class:`~tercet.streams.frames.FrameTooLong` or ``msgspec.DecodeError`` for what it never sends.
    """
    frames = Splitter(LONGEST)
    try:
        while data := await reader.read(CHUNK):
            for frame in frames.split(data):
                yield decoder.decode(frame)
    except ConnectionError:
        return
