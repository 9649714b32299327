"""The receiving process, which receives over every measured transport and over plain sockets."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from benchmarks.transfer.cases import MIB, Case
from benchmarks.transfer.libraries import LIBRARIES, Library, Offered
from benchmarks.transfer.unsignalled import start_unsignalled

from tercet.protocol import Content, EngineError, TercetError, content_of, packed
from tercet.transport import Grant, KVRegion, RankTransport, TransportSettings
from tercet.transport.agent.agent import past_the_caches
from tercet.transport.sockets import Vector, tune

FINGERPRINT = "bench"
ANSWER_SECONDS = 120.0


class ReceivingProcess:
    """A process with a region for one case.

    Calls raise :class:`~tercet.protocol.EngineError` if the process fails or ends.
    """

    def __init__(self, case: Case) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, case), daemon=True)
        self._theirs = theirs

    def call(self, method: str, *args: Any) -> Any:
        """Run a method of :class:`_Receiving` in the process, and return its result."""
        try:
            self._pipe.send((method, args))
            if not self._pipe.poll(ANSWER_SECONDS):
                raise EngineError(f"the receiving process did not answer {method} within {ANSWER_SECONDS:.0f} s")
            value, error = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise EngineError(f"the receiving process ended during {method}") from error
        if error is not None:
            raise EngineError(error)
        return value

    def __enter__(self) -> ReceivingProcess:
        try:
            with _environment(past_the_caches(os.environ)):  # as an engine starts its agent
                start_unsignalled(self._process)
        except BaseException:
            self._end()
            raise
        finally:
            self._theirs.close()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        """Close the pipe, which lets the process end; kill it if it does not end within 10 s."""
        self._theirs.close()
        self._pipe.close()
        if self._process.pid is None:
            return
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class _Receiving:
    """The methods that the receiving process runs on request."""

    def __init__(self, case: Case) -> None:
        self._region: KVRegion = case.region()
        self._case = case
        self._transports: dict[str, RankTransport] = {}
        self._targets: tuple[int, ...] = ()
        self._libraries: dict[str, Library] = {}

    def listen(self, way: str, settings: bytes) -> tuple[str, ...]:
        """Receive over a transport. Return its addresses."""
        decoded = msgspec.msgpack.decode(settings, type=TransportSettings)
        self._transports[way] = RankTransport(self._region, FINGERPRINT, decoded)
        return self._transports[way].addresses

    def grant(self, way: str, lease: str, blocks: tuple[int, ...], end: int, block_size: int) -> None:
        """Allow the transport's peer to write into blocks."""
        self._transports[way].grants.grant(Grant(lease, (blocks,), 0, end, block_size, packed(range(end)), None))

    def revoke(self, way: str, lease: str) -> int | None:
        """End a lease. Return the end of its valid KV in tokens."""
        return self._transports[way].grants.revoke(lease)

    def content(self, layer: int, blocks: tuple[int, ...]) -> bytes:
        """Return the bytes of blocks of a layer."""
        return b"".join(bytes(self._region.blocks(layer, block)) for block in blocks)

    def close(self, way: str) -> None:
        """Close a transport."""
        self._transports.pop(way).close()

    def sockets(self, streams: int) -> tuple[str, int]:
        """Listen for plain connections, and return the address. Each fills its share of the region repeatedly."""
        whole = self._region.bytes
        share = len(whole) // streams
        return _listen(streams, lambda stream, connection: _drain(connection, whole[stream * share :][:share]))

    def chunk_sockets(self, streams: int) -> tuple[str, int]:
        """Listen for plain connections, and return the address. Each receives its share of :meth:`scatter`'s chunks."""
        return _listen(
            streams, lambda stream, connection: self._drain_chunks(connection, slice(stream, None, streams))
        )  # fmt: skip

    def scatter(self, blocks: tuple[int, ...]) -> None:
        """Set the targets of the next round's chunks, in each layer."""
        self._targets = blocks

    def _drain_chunks(self, connection: socket.socket, share: slice) -> None:
        with connection:
            while connection.recv(1):
                chunks = chunks_of(self._region, self._case, self._targets[share])
                while chunks.left:
                    count = chunks.receive(connection)
                    if not count:
                        return
                    chunks.advance(count)
                connection.sendall(b"!")

    def checked_sockets(self, streams: int, tokens: bytes) -> tuple[str, int]:
        """Listen for plain connections, and return the address. Like :meth:`chunk_sockets`, for checked content."""
        together = threading.Barrier(streams, timeout=ANSWER_SECONDS)
        return _listen(
            streams, lambda stream, connection: self._drain_checked(connection, stream, tokens, together)
        )  # fmt: skip

    def _drain_checked(
        self, connection: socket.socket, stream: int, tokens: bytes, together: threading.Barrier
    ) -> None:
        """Receive on one of several connections. The first one's thread checks the content, and acknowledges."""
        tune(connection)
        with connection:
            while length := connection.recv(1):
                content = connection.recv(length[0], socket.MSG_WAITALL)
                if not stream and msgspec.msgpack.decode(content, type=Content) != content_of(tokens, None):
                    return together.abort()
                chunks = chunks_of(self._region, self._case, self._targets[stream :: together.parties])
                together.wait()  # no byte of KV is written before its content is checked
                while chunks.left:
                    count = chunks.receive(connection)
                    if not count:
                        return None
                    chunks.advance(count)
                together.wait()
                if not stream:
                    connection.sendall(b"!")
        return None

    def direct_connect(self, library: str, offered: bytes) -> None:
        """Prepare to read with a library directly."""
        self._libraries[library] = LIBRARIES[library](self._region)
        self._libraries[library].connect(msgspec.msgpack.decode(offered, type=Offered))

    def direct_read(self, library: str, sources: bytes, targets: bytes) -> None:
        """Read blocks of each layer with a library."""
        self._libraries[library].read(np.frombuffer(sources, np.int32), np.frombuffer(targets, np.int32))

    def direct_close(self, library: str) -> None:
        """Drop the library's agent or engine."""
        del self._libraries[library]

    def cpu_seconds(self) -> float:
        """Return the CPU time of this process so far, in seconds."""
        return time.process_time()


def chunks_of(region: KVRegion, case: Case, blocks: Sequence[int]) -> Vector:
    """Return the places of blocks of every layer, for a sequence of system calls."""
    places = region.places(range(case.layers), np.array(blocks, dtype=np.int64), 0, case.chunk_bytes)
    return Vector(places, region, case.layers * len(blocks) * case.chunk_bytes)


def _listen(streams: int, serve: Callable[[int, socket.socket], None]) -> tuple[str, int]:
    """Accept ``streams`` connections, and serve each in a thread with its number. Return the address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with listener:
            for stream in range(streams):
                connection, _ = listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=serve, args=(stream, connection), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener.getsockname()


def _drain(connection: socket.socket, into: memoryview) -> None:
    """Fill ``into`` from a connection. Each message begins with its length, and is answered with one byte."""
    length = bytearray(8)
    with connection:
        while connection.recv_into(length, 8, socket.MSG_WAITALL) == 8:
            left, at = int.from_bytes(length, "little"), 0
            while left:
                count = connection.recv_into(into[at : at + min(left, MIB)])
                if not count:
                    return
                left -= count
                at = (at + count) % max(1, len(into) - MIB)
            connection.sendall(b"!")


@contextmanager
def _environment(variables: Mapping[str, str]) -> Generator[None]:
    """Set environment variables for processes that start while the context is open."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _serve(pipe: Connection, case: Case) -> None:
    receiving = _Receiving(case)
    while True:
        try:
            method, args = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (getattr(receiving, method)(*args), None)
        except TercetError as error:
            answer = (None, error.message)
        except Exception as error:
            answer = (None, f"{type(error).__name__}: {error}")
        try:
            pipe.send(answer)
        except OSError:  # the parent no longer waits for the answer
            return
