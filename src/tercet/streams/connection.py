"""One engine's connection to one front door."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import cast

import msgspec

from tercet.protocol import Conflict, EngineError, EngineLoad, FrontDoorUnreachable, Output, TercetError
from tercet.protocol.wire import Destination, StartGenerateCall
from tercet.streams.frames import FrameTooLong, Splitter
from tercet.streams.messages import (
    LONGEST_FRAME,
    PROTOCOL,
    REPORT_SECONDS,
    SILENCE_SECONDS,
    Hello,
    Item,
    Order,
    Step,
    failed_item,
    frame_of,
    item_of,
)

logger = logging.getLogger(__name__)
Start = Callable[[StartGenerateCall, Destination], Awaitable[None]]
"""Has the engine generate for a front door; returns once the engine has the sequence, or raises."""
# What a front door that has stopped reading may leave unread before it counts as gone.
MOST_UNSENT = 16 * 1024 * 1024
# Cancellations of sequences that are not here: over, or still on their way here by HTTP.
CANCELLED_KEPT = 4096
_orders = msgspec.msgpack.Decoder(Order)


class Voice:
    """What one sequence says to its front door. Use :meth:`Connection.voice`."""

    __slots__ = ("_connection", "number", "position", "stop")

    def __init__(self, connection: Connection, number: int, position: int, stop: Callable[[], object]) -> None:
        self._connection = connection
        self.number = number
        self.position = position
        self.stop = stop

    def say(self, output: Output) -> None:
        """New tokens; goes out with what else this engine step produced."""
        item = item_of(self.number, self.position, output)
        self.position += len(output.token_ids)
        self._connection.send(item)
        if output.finish_reason is not None:
            self.close()

    def fail(self, error: TercetError) -> None:
        """The sequence has ended in an error."""
        self._connection.send(failed_item(self.number, self.position, error))
        self.close()

    def close(self) -> None:
        """Nothing more will be said."""
        self._connection.end(self)


class Connection(asyncio.Protocol):
    """Steps go out, orders come in. ``lost`` is called once it is over; every sequence is stopped then.

    ``start`` does what orders ask for; what it raises ends the sequence.
    """

    protocol = PROTOCOL

    def __init__(self, load: Callable[[], EngineLoad | None], start: Start, lost: Callable[[], None]) -> None:
        self._load = load
        self._start = start
        self._lost = lost
        self._starting: set[asyncio.Task[None]] = set()
        self._splitter = Splitter(LONGEST_FRAME)
        self._transport: asyncio.Transport | None = None
        self._accepted = asyncio.Event()
        self._failure: Exception | None = None
        self._voices: dict[int, Voice] = {}
        self._cancelled: OrderedDict[int, None] = OrderedDict()
        self._items: list[Item] = []
        self._said = self._heard = time.monotonic()

    @property
    def open(self) -> bool:
        """Whether the front door has said that it listens, and has not gone since."""
        transport = self._transport
        return self._accepted.is_set() and transport is not None and not transport.is_closing()

    async def greet(self, hello: Hello) -> None:
        """Say who speaks; returns once the front door has accepted it. Raises ``OSError`` if it does not."""
        if self._transport is not None:
            self._transport.write(frame_of(hello))
        await self._accepted.wait()
        if self._failure is not None:
            raise self._failure

    def voice(self, number: int, position: int, stop: Callable[[], object]) -> Voice:
        """A sequence begins to speak; ``stop`` is called when nobody listens to it any more, not after its end.

        Raises :class:`~tercet.protocol.Conflict` if it was cancelled before it began or runs already, and
        :class:`~tercet.protocol.FrontDoorUnreachable` if the connection is over.
        """
        if number in self._cancelled:
            del self._cancelled[number]
            raise Conflict(f"door: sequence {number} was cancelled before it began", "door")
        if number in self._voices:
            raise Conflict(f"door: sequence {number} runs already", "door")
        if not self.open:
            raise FrontDoorUnreachable("door: the front door has gone", "door")
        voice = self._voices[number] = Voice(self, number, position, stop)
        return voice

    def end(self, voice: Voice) -> None:
        """See :meth:`Voice.close`."""
        self._voices.pop(voice.number, None)

    def send(self, item: Item) -> None:
        """Goes out with all other items of this pass of the event loop."""
        if not self._items:
            asyncio.get_running_loop().call_soon(self._flush)
        self._items.append(item)

    def tick(self) -> None:
        """A report, if nothing went out lately; the end, if the front door is silent or does not read."""
        now = time.monotonic()
        transport = self._transport
        stuck = transport is not None and transport.get_write_buffer_size() > MOST_UNSENT
        if stuck or now - self._heard > SILENCE_SECONDS:
            self.abort()
        elif now - self._said >= REPORT_SECONDS / 2:
            self._flush()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        items, self._items = self._items, []
        self._said = time.monotonic()
        if self.open and self._transport is not None:
            self._transport.write(frame_of(Step(tuple(items), self._load())))

    # ---- asyncio's protocol ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._accepted.is_set():
            self._failure = exc or ConnectionError("it did not accept the key")
            self._accepted.set()
        self._lost()
        voices, self._voices = self._voices, {}
        for voice in voices.values():
            voice.stop()

    def data_received(self, data: bytes) -> None:
        self._heard = time.monotonic()
        try:
            for frame in self._splitter.split(data):
                self._obey(_orders.decode(frame))
        except (msgspec.MsgspecError, FrameTooLong):
            self.abort()

    def _obey(self, order: Order) -> None:
        self._accepted.set()
        for number in order.cancelled:
            voice = self._voices.pop(number, None)
            if voice is not None:
                voice.stop()
            else:
                self._cancelled[number] = None
                if len(self._cancelled) > CANCELLED_KEPT:
                    self._cancelled.popitem(last=False)
        for call in order.starts:
            if call.door is None:
                logger.error("a front door asks for a sequence without saying where its tokens go")
                self.abort()
                return
            task = asyncio.get_running_loop().create_task(self._begin(call, call.door))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _begin(self, call: StartGenerateCall, door: Destination) -> None:
        try:
            await self._start(call, door)
        except TercetError as error:
            self.send(failed_item(door.number, len(call.output), error))
        except Exception as error:  # it fails its own sequence only
            logger.exception("a sequence failed")
            failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
            self.send(failed_item(door.number, len(call.output), failure))
