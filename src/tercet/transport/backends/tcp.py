"""``tcp``: the receiver requests chunks over several connections, and the sender writes them from KV memory.

The sender opens the connections; one of its threads waits on each for requests (:func:`serve`). A receiver can request
only chunks of running sends to it. The next request is sent while the current one is answered, so the round trip is
paid once, not for each chunk. The first ones are sent before the receiver has checked whether it wants the send: the
bytes wait in the connection meanwhile, and are discarded if it does not.
"""

from __future__ import annotations

import queue
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from tercet.protocol import TercetError, TransferFailed
from tercet.transport.backends.reading import NOWHERE, Backend, Batch, SendingPeer, UnderLease
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
# Maximum bytes of a chunk that passes through buffers of a rank, of one that goes from its place to its place, and of
# one that does so within a machine, where it takes milliseconds; a chunk of one larger block is allowed.
MAX_CHUNK_BYTES, LONGEST_CHUNK_BYTES, LOCAL_CHUNK_BYTES = (size * 1024 * 1024 for size in (8, 32, 128))
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


def chunk_bytes(total: int, streams: int, longest: int) -> int:
    """Return the maximum bytes of KV in a chunk, if ``total`` bytes are shared among ``streams`` connections.

    The code between two chunks runs with cold caches, which makes many small chunks slow.
    """
    return min(longest, max(LEAST_CHUNK_BYTES, -(-total // streams)))


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
        if request.nbytes > max(LOCAL_CHUNK_BYTES, region.shape.block_bytes):
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
        # Chunks that were requested by ask_early, with their connections.
        self._early: list[tuple[_Connection, ReadDescriptors]] = []
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

    def ask_early(self, chunks: Sequence[ReadDescriptors]) -> None:
        """Request first chunks now, one on each connection: they come while the caller checks whether to read them.

        :meth:`read` or :meth:`discard` must follow, by the same thread.
        """
        if self._early:
            return
        for connection, chunk in zip(self._connections, chunks, strict=False):
            if 0 < chunk.nbytes <= LONGEST_CHUNK_BYTES:  # so that little is discarded
                self._early.append((connection, chunk))
                connection.ask(chunk)

    def discard(self) -> None:
        """Receive chunks that were requested early, but are not read; their sender waits until they are received."""
        while self._early:
            connection, chunk = self._early.pop()
            if connection.word() == chunk.send:
                connection.skip(chunk.nbytes)
                connection.word()

    def read(self, batch: Batch, under_lease: UnderLease) -> bool:
        if not batch.chunks:
            return True
        work = _Work(batch, under_lease)
        connections = {each: work.begin() for each in self._ready()[: len(batch.chunks)]}
        self._early = [
            (connection, chunk) for connection, chunk in self._early
            if connection not in connections or not work.has(chunk, connections[connection])
        ]  # fmt: skip
        self.discard()
        # This thread asks on all of them, so that the first chunks are under way while the other threads wake up.
        ours, *others = connections.items()
        work.ask(*ours, patient=True)
        for each, asked in others:
            work.ask(each, asked, patient=False)
        for each, asked in others:
            each.jobs.put((work, asked))
        work.run(*ours)
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
            each.jobs.put(None)  # no work follows: only the thread that calls this hands it out


@dataclass
class _Asked:
    """A requested chunk."""

    # Its number in a batch.
    index: int
    chunk: ReadDescriptors
    # The chunk passes through it, if there is one.
    room: StagingBuffer | None = None

    def give_back(self) -> None:
        if self.room is not None:
            self.room.give_back()


class _Work:
    """A batch that several connections share; each takes the next chunk when it has room for it."""

    def __init__(self, batch: Batch, under_lease: UnderLease) -> None:
        self._batch, self._under_lease = batch, under_lease
        self._left = deque(range(len(batch.chunks)))  # the numbers of those that no connection has taken
        self._working = 0
        self._alive = True
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def begin(self) -> deque[_Asked]:
        """Return what a connection has been asked for, nothing so far; :meth:`run` must follow, in any thread."""
        with self._changed:
            self._working += 1
        return deque()

    def has(self, chunk: ReadDescriptors, asked: deque[_Asked]) -> bool:
        """Take ``chunk``, which was requested already; return False if it is not in the batch."""
        if self._batch.memory is not None:
            return False
        for index in self._left:
            found = self._batch.chunks[index]
            if (found.send, found.chunk, found.nbytes) == (chunk.send, chunk.chunk, chunk.nbytes):
                self._left.remove(index)
                asked.append(_Asked(index, found))
                return True
        return False

    def ask(self, connection: _Connection, asked: deque[_Asked], *, patient: bool) -> None:
        """Request a chunk on a connection that was asked for none, if there is one and room for it."""
        try:
            if not asked:
                self._ask(connection, asked, patient=patient)
        except Exception as error:
            self._fail(error)

    def run(self, connection: _Connection, asked: deque[_Asked]) -> None:
        """Receive the chunks of ``asked`` and further ones, until all are taken."""
        try:
            while True:
                while len(asked) < REQUESTS_AHEAD and self._ask(connection, asked, patient=not asked):
                    pass
                if not asked:
                    return
                first = asked.popleft()
                try:
                    self._receive(connection, first)
                finally:
                    first.give_back()
        except Exception as error:
            self._fail(error)  # the thread that waits for the whole batch raises it
        finally:
            for each in asked:
                each.give_back()
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def _ask(self, connection: _Connection, asked: deque[_Asked], *, patient: bool) -> bool:
        """Request one more chunk; return False if all are taken, or if no room is free now."""
        wanted = self._take(patient=patient)
        if wanted is None:
            return False
        try:
            connection.ask(wanted.chunk)
        except BaseException:
            wanted.give_back()
            raise
        asked.append(wanted)
        return True

    def _take(self, *, patient: bool) -> _Asked | None:
        """Return the next chunk, with room for it, or None if all are taken.

        Unless ``patient``, the result is also None if no room is free now. Room is taken before the request: so a
        sender of a chunk never waits for a thread that waits for room.
        """
        memory, room = self._batch.memory, None
        if memory is not None:
            if not self._left:
                return None  # all are taken: do not wait for room
            room = memory.room() if patient else memory.room_at_once()
            if room is None:
                return None
        with self._changed:
            if self._error is not None or not self._alive or not self._left:
                if room is not None:
                    room.give_back()
                return None
            index = self._left.popleft()
        return _Asked(index, self._batch.chunks[index], room)

    def _places(self, index: int) -> Vector:
        copies, target = self._batch.copies[index], self._batch.target
        # Few calls: their code is out of the caches after each chunk.
        places = np.add(copies[:, ::-2], (address_of(target), 0), order="C").view(np.uint64)
        owners: tuple[memoryview, ...] = (target,)
        if copies[:, 2].min() == NOWHERE:  # the bytes of blocks that are left out arrive, too
            left_out = copies[:, 2] == NOWHERE
            owners = (target, memoryview(bytearray(int(copies[left_out, 0].max()))))
            places[left_out, 0] = address_of(owners[1])
        return Vector(places, owners, self._batch.chunks[index].nbytes)

    def _receive(self, connection: _Connection, asked: _Asked) -> None:
        """Read a chunk; one that the lease no longer accepts is read and discarded, since others follow it."""
        # Found now, since a first chunk is still on its way.
        into = self._places(asked.index) if asked.room is None else whole(asked.room.bytes[: asked.chunk.nbytes])
        if connection.word() != asked.chunk.send:
            return self._give_up()  # no bytes follow
        if asked.room is None:
            self._receive_in_place(connection, into)
        else:
            while into.left:
                connection.wait()
                connection.fill(into)
        if connection.word() != asked.chunk.send:
            self._give_up()
        elif asked.room is not None:
            self._put(asked, asked.room)
        return None

    def _receive_in_place(self, connection: _Connection, into: Vector) -> None:
        while into.left:
            connection.wait()
            try:
                self._under_lease(lambda: connection.fill(into))
            except TercetError as error:
                self._fail(error)
                connection.skip(into.left)
                return

    def _put(self, asked: _Asked, room: StagingBuffer) -> None:
        """Copy the received bytes into their blocks, while the lease is held."""
        memory, chunk = self._batch.memory, asked.chunk
        if memory is None:
            return
        layers, blocks = range(chunk.layer, chunk.layer + chunk.layers), self._batch.blocks[asked.index]
        try:
            here, order = chunk.part * chunk.size, self._batch.order
            self._under_lease(lambda: memory.put(room, layers, blocks, here, chunk.size, order))
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
            self._changed.wait_for(lambda: not self._working)
            if self._error is not None:
                raise self._error
            return self._alive


class _Connection:
    """One connection for chunks; one thread uses it at a time."""

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        self._timeout = timeout
        self.jobs: queue.SimpleQueue[tuple[_Work, deque[_Asked]] | None] = queue.SimpleQueue()
        self._scratch = memoryview(bytearray(64 * 1024))
        self._sock = sock
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def work(self) -> None:
        """Take part in reads until the session ends."""
        while (job := self.jobs.get()) is not None:
            work, asked = job
            work.run(self, asked)

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

    def skip(self, nbytes: int) -> None:
        """Receive bytes, and discard them."""
        rest = nowhere(nbytes, self._scratch)
        while rest.left:
            self.wait()
            self.fill(rest)

    def word(self) -> int:
        """Read the word before or after a chunk: the send's number, or 0 if the send has ended."""
        data = b""
        while len(data) < WORD.size:
            try:
                part = self._sock.recv(WORD.size - len(data))
            except BlockingIOError:  # not within SO_RCVTIMEO
                self.wait()
                continue
            if not part:
                raise ConnectionResetError("the sender closed the connection")
            data += part
        return WORD.unpack(data)[0]
