"""KV events of a store, in vLLM's form, so that routers follow it as they follow engines.

Batches are numbered and published by ZeroMQ. A subscriber that has missed some asks for them: recent ones are repeated;
instead of older ones it gets a summary, which begins with an event that clears everything. The summary's batches have
new numbers, which no subscriber has applied; under these numbers all others get batches without events.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import starmap
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tercet.aio.tasks import TaskSet
from tercet.fleet.kv_events import NUMBER_BYTES, AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from tercet.protocol import BadRequest
from tercet.protocol.content import unpacked
from tercet.store.contents import BlockContent
from tercet.transport.sockets import bind_at, bounded

KEPT_BATCHES = 1000
EVENTS_OF_A_BATCH = 512
LONGEST_REQUEST = 1024
Event = BlockStored | BlockRemoved | AllBlocksCleared


class Announcer:
    """The publisher of a store's events at ``host``; ``held`` returns all blocks that it has, each with its medium.

    Events are at ``port``, and those who missed some ask at the port after it; 0 means any ports. Raises
    :class:`~tercet.protocol.BadRequest` for a port in use.
    """

    def __init__(
        self, host: str, block_size: int, held: Callable[[], Iterable[tuple[BlockContent, str]]],
        port: int = 0,
    ) -> None:  # fmt: skip
        self._block_size, self._held = block_size, held
        self._next = 0
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._events: list[Event] = []
        # It drops what a subscriber does not read, and so never waits.
        self._live: Any = bounded(_socket(zmq.PUB), LONGEST_REQUEST)
        self._asked: Any = bounded(zmq.asyncio.Context.instance().socket(zmq.ROUTER), LONGEST_REQUEST)
        self._live.linger = self._asked.linger = 0
        self._asked.sndhwm = 0  # a ROUTER drops messages beyond its queue
        try:
            endpoint = bind_at(self._live, host, port)
            self.addresses = {"endpoint": endpoint, "replay": bind_at(self._asked, host, port and port + 1)}
        except zmq.ZMQError as error:
            self._live.close()
            self._asked.close()
            reason = os.strerror(error.errno or 0)
            raise BadRequest(
                f"kv-events-port: {port} or {port + 1} cannot be used: {reason}; choose another one", "kv-events-port"
            ) from error
        self._tasks = TaskSet()

    def start(self) -> None:
        self._tasks.keep(self._repeat, "replay of KV events")

    def stored(self, content: BlockContent, medium: str) -> None:
        """Publish soon that the store holds a block on a medium."""
        self._soon(self._stored(content, medium))

    def removed(self, name: bytes, medium: str) -> None:
        """Publish soon that the store does not hold a block on a medium any more."""
        self._soon(BlockRemoved([name], medium=medium))

    def _soon(self, event: Event) -> None:
        if not self._events:
            asyncio.get_running_loop().call_soon(self._publish)
        self._events.append(event)

    def _publish(self) -> None:
        events, self._events = self._events, []
        for some in _batches(events):
            self._number(_encoded(some))

    def _number(self, payload: bytes) -> int:
        """Publish a batch under the next number, and return the number."""
        number, self._next = self._next, self._next + 1
        self._recent.append((number, payload))
        self._live.send_multipart([b"", _bytes_of(number), payload])
        return number

    async def _repeat(self) -> None:
        while True:
            caller, *rest = await self._asked.recv_multipart()
            first = int.from_bytes(rest[-1][:NUMBER_BYTES], "big")
            answers = [*self._batches_from(first), (-1, b"")]  # the last one is the end
            sent = ([caller, b"", b"", _bytes_of(number), payload] for number, payload in answers)
            await asyncio.gather(*map(self._asked.send_multipart, sent))

    def _batches_from(self, first: int) -> list[tuple[int, bytes]]:
        """Return the batches from ``first`` on, or a summary of all."""
        self._publish()
        if first and first >= self._next - len(self._recent):
            return [each for each in self._recent if each[0] >= first]
        events: list[Event] = [AllBlocksCleared(), *starmap(self._stored, self._held())]
        return [(self._number(_encoded([])), _encoded(some)) for some in _batches(events)]

    def _stored(self, content: BlockContent, medium: str) -> BlockStored:
        keys: list[Any] = [list(each) for each in content.features]
        if content.salt is not None:
            keys.append(content.salt)
        return BlockStored(
            [content.name], content.parent, list(unpacked(content.tokens)), self._block_size,
            lora_name=content.adapter, extra_keys=[keys or None], medium=medium,
        )  # fmt: skip

    async def close(self) -> None:
        await self._tasks.close()
        self._live.close()
        self._asked.close()


def _socket(kind: int) -> Any:
    make: Any = zmq.Context.instance
    return make().socket(kind)


def _batches(events: Sequence[Event]) -> Iterable[Sequence[Event]]:
    return (events[at : at + EVENTS_OF_A_BATCH] for at in range(0, len(events), EVENTS_OF_A_BATCH))


def _encoded(events: Sequence[Event]) -> bytes:
    return msgspec.msgpack.encode(EventBatch(time.time(), list(events)))


def _bytes_of(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big", signed=True)
