"""One engine's stream, at the front door."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import msgspec

from tercet.protocol import EngineLoad, EngineUnreachable, OutputStream
from tercet.protocol.wire import StartGenerateCall
from tercet.streams.inbox import Inbox
from tercet.streams.messages import Order, Step, frame_of

_steps = msgspec.msgpack.Decoder(Step)


class Line:
    """The sequences that one engine runs for this front door, and the connection that their tokens come by.

    The engine connects to ``address`` and shows ``key`` there. ``on_load`` is told every report of its load. Numbers
    of sequences are ``numbers``'s: never used twice in this process, so that what comes late is nobody's.
    """

    def __init__(self, engine: str, numbers: itertools.count[int], on_load: Callable[[EngineLoad], None]) -> None:
        self.engine = engine
        self.key = secrets.token_hex(16)
        self.address = ""
        self.heard = -float("inf")
        self._inbox = Inbox(engine)
        self._numbers = numbers
        self._on_load = on_load
        self._connection: asyncio.Transport | None = None

    @property
    def connected(self) -> bool:
        """Whether tokens can arrive."""
        return self._connection is not None

    @property
    def open_sequences(self) -> int:
        """How many sequences wait for tokens."""
        return len(self._inbox)

    @contextmanager
    def sequence(self, position: int, stream: OutputStream) -> Generator[int]:
        """A new sequence's number; its outputs are put into ``stream``, from the one at ``position`` on.

        What is not over at the exit is cancelled on the engine.
        """
        number = next(self._numbers)
        self._inbox.open(number, position, stream)
        try:
            yield number
        finally:
            if self._inbox.close(number):
                self._order(Order(cancelled=(number,)))

    def start(self, call: StartGenerateCall) -> None:
        """Have the engine generate; outputs and errors come to the sequence that ``call.door`` numbers."""
        self._order(Order(starts=(call,)))

    def take(self, frame: bytes) -> None:
        """The engine sent this; raises ``msgspec.MsgspecError`` for what no engine sends."""
        step = _steps.decode(frame)
        self.heard = time.monotonic()
        if step.load is not None:
            self._on_load(step.load)
        unwanted = self._inbox.take(step.items)
        if unwanted:
            self._order(Order(cancelled=tuple(unwanted)))

    def attach(self, connection: asyncio.Transport) -> None:
        """The engine has connected, perhaps again: then what the connection before carried is lost."""
        if self._connection is not None:
            self.drop("connected anew")
        self._connection = connection
        self.heard = time.monotonic()
        self.beat()

    def detach(self, connection: asyncio.Transport, why: str) -> None:
        """A connection is closed."""
        if connection is self._connection:
            self.drop(why)

    def drop(self, why: str) -> None:
        """Close the connection; every sequence ends with :class:`~tercet.protocol.EngineUnreachable`."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        self._inbox.lose(EngineUnreachable(f"{self.engine}: its token stream ended: {why}"))

    def beat(self) -> None:
        """Tell the engine that somebody is listening."""
        self._order(Order())

    def _order(self, order: Order) -> None:
        if self._connection is not None and not self._connection.is_closing():
            self._connection.write(frame_of(order))
