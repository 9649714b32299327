"""``tcp``: the receiver requests chunks over several connections, and the sender writes them from KV memory.

The sender opens the connections; one of its threads waits on each for requests (:func:`serve`). A receiver can request
only chunks of running sends to it. The next request is sent while the current one is answered, so the round trip is
paid once, not for each chunk.
"""

from __future__ import annotations

import queue
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Self

import numpy as np

from tercet.protocol import TercetError, TransferFailed
from tercet.transport.backends.reading import NOWHERE, Backend, Batch, Fence, SendingPeer
from tercet.transport.peer_messages import (
    REQUESTS,
    WORD,
    MessageSplitter,
    ProtocolViolation,
    ReadDescriptors,
    ReadRequest,
    framed,
)
from tercet.transport.region import KVRegion
from tercet.transport.sockets import Vector, address_of, nowhere, send_all
from tercet.transport.staged import StagingBuffer, whole

# Maximum number of connections of one session.
MAX_STREAMS = 64
# Number of requested chunks that have not arrived yet, on each connection.
REQUESTS_AHEAD = 2
CONNECT_SECONDS = 10.0
# Maximum bytes of a chunk; a chunk of one larger block is allowed.
MAX_CHUNK_BYTES = 8 * 1024 * 1024
# Chunks are not made smaller than this to use further connections.
LEAST_CHUNK_BYTES = 4 * 1024 * 1024

Reading = Callable[[ReadRequest], AbstractContextManager[Vector | None]]


class TcpBackend(Backend):
    """Backend that reads regions of ranks on any machine, by requests to them."""

    name = "tcp"
    stages = True

    def connect(self, offer: bytes, sender: SendingPeer) -> TcpReader:
        return TcpReader()


# ---- the sender's side -----------------------------------------------------------------------------------------------


def chunk_bytes(total: int, streams: int) -> int:
    """Return the maximum bytes of KV in a chunk, if ``total`` bytes are shared among ``streams`` connections.

    The code between two chunks runs with cold caches, which makes many small chunks slow.
    """
    return min(MAX_CHUNK_BYTES, max(LEAST_CHUNK_BYTES, -(-total // streams)))


def serve(sock: socket.socket, region: KVRegion, reading: Reading) -> None:
    """Answer requests until the receiver closes the connection; raise ``OSError`` or :class:`ProtocolViolation`.

    ``reading`` yields the chunk's memory while entered, None if its send has ended. It raises for a chunk that was
    never offered.
    """
    splitter = MessageSplitter(REQUESTS)
    while True:
        try:
            data = sock.recv(64 * 1024)
        except (TimeoutError, BlockingIOError):
            continue  # a receiver may request nothing for a long time
        if not data:
            raise ConnectionResetError("the receiver closed the connection")
        for request in splitter.feed(data):
            with reading(request) as found:
                _answer(sock, region, request, found)


def _answer(sock: socket.socket, region: KVRegion, request: ReadRequest, found: Vector | None) -> None:
    if found is None or not region.has_word(request.send):
        if request.nbytes > max(MAX_CHUNK_BYTES, region.shape.block_bytes):
            raise ProtocolViolation(f"a request for {request.nbytes} bytes, which is more than a chunk may have")
        sock.sendall(WORD.pack(0))
        return
    # Send no bytes for a send that has ended: the receiver would write them over KV that it may have.
    sock.sendall(WORD.pack(request.send), socket.MSG_MORE)
    send_all(sock, found)
    # Check again: the sent bytes are KV only if the blocks were pinned until the last byte was read.
    sock.sendall(WORD.pack(request.send if region.has_word(request.send) else 0))


# ---- the receiver's side ---------------------------------------------------------------------------------------------


class TcpReader:
    """Reader of one session. Its connections register here, each with a thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._connections: list[_Connection] = []
        self._closed = False

    def serve(self, sock: socket.socket, timeout: float) -> None:
        """Serve a connection of the session until it ends; called by the connection's thread.

        A sender that sends no bytes for ``timeout`` seconds while a request is pending counts as lost.
        """
        connection = _Connection(sock, timeout)
        with self._changed:
            if self._closed or len(self._connections) >= MAX_STREAMS:
                raise ProtocolViolation("no such session, or it has too many connections")
            self._connections.append(connection)
            self._changed.notify_all()
        connection.work()

    def read(self, batch: Batch, fence: Fence) -> bool:
        if not batch.chunks:
            return True
        first, *others = self._ready()
        work = _Work(batch, fence)
        for each in others[: len(batch.chunks) - 1]:
            each.jobs.put(work)
        work.run(first)
        return work.finish()

    def _ready(self) -> list[_Connection]:
        with self._changed:
            if not self._changed.wait_for(lambda: self._connections or self._closed, CONNECT_SECONDS) or self._closed:
                raise TransferFailed("tcp: the sender did not open a connection to read from")
            return list(self._connections)

    def close(self) -> None:
        """End the session; the connections' threads then end."""
        with self._changed:
            self._closed = True
            connections = list(self._connections)
            self._changed.notify_all()
        for each in connections:
            each.jobs.put(None)


@dataclass
class _Asked:
    """A requested chunk and its target. Leaving its context gives the room back."""

    # Its number in a batch.
    index: int
    chunk: ReadDescriptors
    into: Vector
    # The chunk passes through it, if there is one.
    room: StagingBuffer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        if self.room is not None:
            self.room.give_back()


class _Work:
    """A batch that several connections share; each takes the next chunk when it has room for it."""

    def __init__(self, batch: Batch, fence: Fence) -> None:
        self._batch, self._fence = batch, fence
        self._next = 0
        self._working = 0
        self._alive = True
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def run(self, connection: _Connection) -> None:
        with self._changed:
            self._working += 1
        asked: deque[_Asked] = deque()
        try:
            while True:
                while len(asked) < REQUESTS_AHEAD and (wanted := self._take(patient=not asked)) is not None:
                    asked.append(wanted)
                    connection.ask(wanted.chunk)
                if not asked:
                    return
                with asked.popleft() as first:
                    self._receive(connection, first)
        except Exception as error:
            self._fail(error)  # the thread that waits for the whole batch raises it
        finally:
            for each in asked:
                each.give_back()
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def _take(self, *, patient: bool) -> _Asked | None:
        """Return the next chunk, with room for it, or None if all are taken.

        Unless ``patient``, the result is also None if no room is free now. Room is taken before the request: so a
        sender of a chunk never waits for a thread that waits for room.
        """
        memory, room = self._batch.memory, None
        if memory is not None:
            if self._next == len(self._batch.chunks):
                return None  # all are taken: do not wait for room
            room = memory.room() if patient else memory.room_at_once()
            if room is None:
                return None
        with self._changed:
            if self._error is not None or not self._alive or self._next == len(self._batch.chunks):
                if room is not None:
                    room.give_back()
                return None
            index = self._next
            self._next += 1
        chunk = self._batch.chunks[index]
        if room is not None:
            return _Asked(index, chunk, whole(room.bytes[: chunk.nbytes]), room)
        return _Asked(index, chunk, self._places(index))

    def _places(self, index: int) -> Vector:
        copies = self._batch.copies[index]
        places = np.empty((len(copies), 2), dtype=np.uint64)
        places[:, 0] = copies[:, 2] + address_of(self._batch.target)
        places[:, 1] = copies[:, 0]
        owners: tuple[memoryview, ...] = (self._batch.target,)
        left_out = copies[:, 2] == NOWHERE
        if left_out.any():  # their bytes arrive, too
            owners = (self._batch.target, memoryview(bytearray(int(copies[left_out, 0].max()))))
            places[left_out, 0] = address_of(owners[1])
        return Vector(places, owners, self._batch.chunks[index].nbytes)

    def _receive(self, connection: _Connection, asked: _Asked) -> None:
        """Read a chunk; one that the lease no longer accepts is read and discarded, since others follow it."""
        if connection.word() != asked.chunk.send:
            return self._give_up()  # no bytes follow
        if asked.room is None:
            self._receive_in_place(connection, asked.into)
        else:
            while asked.into.left:
                connection.wait()
                connection.fill(asked.into)
        if connection.word() != asked.chunk.send:
            self._give_up()
        elif asked.room is not None:
            self._put(asked, asked.room)
        return None

    def _receive_in_place(self, connection: _Connection, into: Vector) -> None:
        while into.left:
            connection.wait()
            try:
                self._fence(lambda: connection.fill(into))
            except TercetError as error:
                self._fail(error)
                rest = nowhere(into.left, connection.scratch)
                while rest.left:
                    connection.wait()
                    connection.fill(rest)
                return

    def _put(self, asked: _Asked, room: StagingBuffer) -> None:
        """Copy the received bytes into their blocks, while the lease is held."""
        memory, chunk = self._batch.memory, asked.chunk
        if memory is None:
            return
        layers, blocks = range(chunk.layer, chunk.layer + chunk.layers), self._batch.blocks[asked.index]
        try:
            here, order = chunk.part * chunk.size, self._batch.order
            self._fence(lambda: memory.put(room, layers, blocks, here, chunk.size, order))
        except TercetError as error:
            self._fail(error)

    def _give_up(self) -> None:
        """Record that the sender has ended the send."""
        with self._changed:
            self._alive = False

    def _fail(self, error: Exception) -> None:
        with self._changed:
            # The error of a broken connection comes first: it ends the session.
            if self._error is None or isinstance(error, OSError):
                self._error = error

    def finish(self) -> bool:
        """Wait for the other connections.

        Raise the first error; return True if the blocks were pinned all the time.
        """
        with self._changed:
            # A connection that is late finds no chunk to take.
            self._changed.wait_for(lambda: not self._working)
            if self._error is not None:
                raise self._error
            self._next = len(self._batch.chunks)
            return self._alive


class _Connection:
    """One connection for chunks; one thread uses it at a time."""

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        self._timeout = timeout
        self.jobs: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self.scratch = memoryview(bytearray(64 * 1024))
        self._sock = sock
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def work(self) -> None:
        """Take part in reads until the session ends."""
        while (job := self.jobs.get()) is not None:
            job.run(self)

    def ask(self, chunk: ReadDescriptors) -> None:
        self._sock.sendall(framed(ReadRequest(chunk.send, chunk.chunk, chunk.nbytes)))

    def wait(self) -> None:
        """Wait for data; raise ``TimeoutError``."""
        if not self._readable.poll(self._timeout * 1000):
            raise TimeoutError("the sender has not sent the requested chunk in time")

    def fill(self, into: Vector) -> int:
        """Read the available data, and wait for more for ``SO_RCVTIMEO``; return the number of bytes."""
        count = into.receive(self._sock)
        if count == 0:
            raise ConnectionResetError("the sender closed the connection")
        into.advance(count or 0)
        return count or 0

    def word(self) -> int:
        """Read the word before or after a chunk: the send's number, or 0 if the send has ended."""
        data = bytearray(WORD.size)
        into = Vector(np.array([(address_of(data), len(data))], dtype=np.uint64), data, len(data))
        while into.left:
            self.wait()
            self.fill(into)
        return WORD.unpack(data)[0]
