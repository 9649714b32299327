"""The ways to move the bytes of a case into the other process. Each returns the seconds of one round.

NIXL and Mooncake are included twice, for comparison: as backends of Tercet's transport, and called directly.
"""

from __future__ import annotations

import queue
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from benchmarks.transfer.cases import BLOCK_TOKENS, MIB, Case
from benchmarks.transfer.libraries import LIBRARIES
from benchmarks.transfer.receiving_process import FINGERPRINT, ReceivingProcess, chunks_of

from tercet.protocol import TercetError, TransferFailed, content_of, packed
from tercet.transport import HeadSlice, KVRegion, RankTransport, SendDestination, SendReport, TransportSettings
from tercet.transport.sockets import Vector, send_all, tune

ACK_SECONDS = 120.0


class Way(Protocol):
    """A way to move the bytes of one case."""

    @property
    def name(self) -> str:
        """Name of the way in the table."""
        ...

    def move(self) -> float:
        """Move the bytes of the case once. Return the seconds until they have arrived."""
        ...

    def close(self) -> None:
        """Release its resources."""
        ...


class Memcpy:
    """Copies of scattered chunks between two regions of this process, by one thread: an upper limit for transports."""

    name = "memcpy"

    def __init__(self, case: Case, source: KVRegion) -> None:
        self._case, self._source, self._target = case, source, case.region()
        self._choose = random.Random(0)

    def move(self) -> float:
        """Do as :class:`Way` says."""
        case, size = self._case, self._case.chunk_bytes
        there, here = self._source.shape, self._target.shape
        pairs = [
            (there.block(layer, source), here.block(layer, target))
            for layer in range(case.layers)
            for source, target in zip(case.scattered(self._choose), case.scattered(self._choose), strict=True)
        ]
        theirs, ours = self._source.bytes, self._target.bytes
        began = time.perf_counter()
        for source, target in pairs:
            ours[target : target + size] = theirs[source : source + size]
        return time.perf_counter() - began

    def close(self) -> None:
        """Do as :class:`Way` says."""
        self._target.close()


class PlainSockets:
    """Plain TCP over loopback: contiguous memory in calls of 1 MiB, with a thread per stream on both sides."""

    def __init__(self, case: Case, source: KVRegion, peer: ReceivingProcess, streams: int) -> None:
        self.name = f"socket x{streams}"
        self._share = case.moved_bytes // streams
        host, port = peer.call("sockets", streams)
        self._connections = [socket.create_connection((host, port)) for _ in range(streams)]
        self._parts = [source.bytes[at * self._share : (at + 1) * self._share] for at in range(streams)]

    def move(self) -> float:
        """Do as :class:`Way` says."""
        return _by_threads(_send, zip(self._connections, self._parts, strict=True))

    def close(self) -> None:
        """Do as :class:`Way` says."""
        for connection in self._connections:
            connection.close()


def _send(connection: socket.socket, data: memoryview) -> None:
    connection.sendall(len(data).to_bytes(8, "little"))
    for start in range(0, len(data), MIB):
        connection.sendall(data[start : start + MIB])
    connection.recv(1)


class ChunkedSockets:
    """Plain TCP over loopback with the chunks of the case, sent by I/O vectors without a copy.

    This is the limit of sockets for KV, whose chunks are not contiguous in memory.
    """

    def __init__(self, case: Case, source: KVRegion, peer: ReceivingProcess, streams: int) -> None:
        self.name = f"chunks x{streams}"
        self._case, self._source, self._peer, self._streams = case, source, peer, streams
        self._choose = random.Random(0)
        address = tuple(peer.call("chunk_sockets", streams))
        self._connections = [socket.create_connection(address) for _ in range(streams)]

    def move(self) -> float:
        """Do as :class:`Way` says."""
        sources, targets = self._case.scattered(self._choose), self._case.scattered(self._choose)
        self._peer.call("scatter", targets)
        shares = [
            chunks_of(self._source, self._case, sources[stream :: self._streams]) for stream in range(self._streams)
        ]
        return _by_threads(_send_chunks, zip(self._connections, shares, strict=True))

    def close(self) -> None:
        """Do as :class:`Way` says."""
        for connection in self._connections:
            connection.close()


def _send_chunks(connection: socket.socket, chunks: Vector) -> None:
    connection.sendall(b"!")
    while chunks.left:
        chunks.advance(chunks.send(connection) or 0)
    connection.recv(1)


class CheckedSockets:
    """Plain TCP over loopback with the work that no send of KV can leave out, in the timed part.

    Both ends hash the content's tokens and find the places of its chunks; the receiver writes no byte before it has
    compared the hashes, and acknowledges once. The connections have the options of ``tcp``.
    """

    def __init__(self, case: Case, source: KVRegion, peer: ReceivingProcess, streams: int) -> None:
        self.name = f"checked x{streams}"
        self._case, self._source, self._peer, self._streams = case, source, peer, streams
        self._choose = random.Random(0)
        self._tokens = packed(range(case.slots * BLOCK_TOKENS))
        address = tuple(peer.call("checked_sockets", streams, self._tokens))
        self._connections = [socket.create_connection(address) for _ in range(streams)]
        for connection in self._connections:
            tune(connection)
        self._answer, self._compared = b"", False

    def move(self) -> float:
        """Do as :class:`Way` says. The first time, compare the received bytes with the sent ones."""
        sources, targets = self._case.scattered(self._choose), self._case.scattered(self._choose)
        self._peer.call("scatter", targets)
        shares = [sources[stream :: self._streams] for stream in range(self._streams)]
        took = _by_threads(self._send, enumerate(shares))
        if self._answer != b"!":
            raise TransferFailed(f"{self.name}: the content was refused")
        if not self._compared:
            _require_same(self.name, self._source, sources, self._peer, targets)
            self._compared = True
        return took

    def _send(self, stream: int, blocks: Sequence[int]) -> None:
        connection = self._connections[stream]
        content = b"" if stream else msgspec.msgpack.encode(content_of(self._tokens, None))
        connection.sendall(bytes([len(content)]) + content, socket.MSG_MORE)
        send_all(connection, chunks_of(self._source, self._case, blocks))
        if not stream:
            self._answer = connection.recv(1)

    def close(self) -> None:
        """Do as :class:`Way` says."""
        for connection in self._connections:
            connection.close()


def _by_threads(target: Callable[..., None], args: Iterable[tuple[Any, ...]]) -> float:
    """Run ``target`` in one thread for each of ``args``. Return the seconds until all have ended."""
    threads = [threading.Thread(target=target, args=each) for each in args]
    began = time.perf_counter()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began
    finally:  # also after an interruption, since the connections are closed next
        for thread in threads:
            if thread.ident is not None:
                thread.join()


class OurTransport:
    """A whole send, as an engine does it: opening, the blocks of every layer, completion, acknowledgement."""

    def __init__(
        self, name: str, case: Case, source: KVRegion, peer: ReceivingProcess, settings: TransportSettings
    ) -> None:
        self.name = name
        self._case, self._peer = case, peer
        self._choose = random.Random(0)
        self._transport = RankTransport(source, FINGERPRINT, settings)
        self._source = source
        self._addresses: tuple[str, ...] = peer.call("listen", name, msgspec.msgpack.encode(settings))
        self._checked = False

    def move(self) -> float:
        """Do as :class:`Way` says. The first time, compare the received bytes with the sent ones."""
        case, lease, send = self._case, secrets.token_hex(16), secrets.token_hex(8)
        sources, targets = case.scattered(self._choose), case.scattered(self._choose)
        end = case.slots * BLOCK_TOKENS
        tokens = packed(range(end))
        self._peer.call("grant", self.name, lease, targets, end, BLOCK_TOKENS)
        outcomes: queue.SimpleQueue[SendReport | TercetError] = queue.SimpleQueue()
        to = SendDestination(self._addresses, HeadSlice(0, case.chunk_bytes))
        began = time.perf_counter()
        self._transport.sends.open(send, lease, content_of(tokens, None), [to], outcomes.put)
        self._transport.sends.push(send, range(case.layers), 0, sources)
        self._transport.sends.finish(send, 0, end)
        outcome = outcomes.get(timeout=ACK_SECONDS)
        took = time.perf_counter() - began
        if isinstance(outcome, TercetError):
            raise outcome
        if self._peer.call("revoke", self.name, lease) != end:
            raise TransferFailed(f"{self.name}: the send was acknowledged, but not all of its KV is valid")
        if not self._checked:
            _require_same(self.name, self._source, sources, self._peer, targets)
            self._checked = True
        return took

    def close(self) -> None:
        """Do as :class:`Way` says."""
        self._transport.close()
        self._peer.call("close", self.name)


class Direct:
    """Reads of all chunks by the other process, with the library alone.

    Nothing is granted or checked: a protocol on top of the library cannot cost less.
    """

    def __init__(self, library: str, case: Case, source: KVRegion, peer: ReceivingProcess) -> None:
        self.name = f"{library} direct"
        self._case, self._source, self._peer, self._library = case, source, peer, library
        self._choose = random.Random(0)
        self._offering = LIBRARIES[library](source)
        peer.call("direct_connect", library, msgspec.msgpack.encode(self._offering.offer()))
        self._checked = False

    def move(self) -> float:
        """Do as :class:`Way` says. The first time, compare the received bytes with the source."""
        sources, targets = self._case.scattered(self._choose), self._case.scattered(self._choose)
        there, here = np.array(sources, dtype=np.int32), np.array(targets, dtype=np.int32)
        began = time.perf_counter()
        self._peer.call("direct_read", self._library, there.tobytes(), here.tobytes())
        took = time.perf_counter() - began
        if not self._checked:
            _require_same(self.name, self._source, sources, self._peer, targets)
            self._checked = True
        return took

    def close(self) -> None:
        """Do as :class:`Way` says."""
        self._peer.call("direct_close", self._library)
        del self._offering


def _require_same(
    way: str, source: KVRegion, sources: Sequence[int], peer: ReceivingProcess, targets: Sequence[int]
) -> None:
    """Compare the first blocks of each layer. Raise :class:`~tercet.protocol.TransferFailed` if they differ."""
    for layer in range(source.num_layers):
        sent = b"".join(bytes(source.blocks(layer, block)) for block in sources[:4])
        if peer.call("content", layer, targets[:4]) != sent:
            raise TransferFailed(f"{way}: the bytes of layer {layer} that arrived differ from those sent")
