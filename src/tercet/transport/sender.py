"""Pushes KV to peers over TCP: one connection per peer, with a thread that writes and one that reads answers.

``push`` only queues, so a slow peer stalls its own sends and nothing else. A send's blocks are read by the writing
thread alone; :meth:`Peer.cancel` is the fence after which they are not.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from tercet.protocol import TercetError, TransferFailed
from tercet.transport.base import OnDone, SendReport
from tercet.transport.direct import LiveTable
from tercet.transport.frames import HEADER_BYTES, MAX_PIECE_BYTES, Header, Kind, ProtocolViolation, hello, unpack
from tercet.transport.memory import KVMemory, runs
from tercet.transport.receiver import SOCKET_BUFFER_BYTES, shut
from tercet.transport.threads import start_thread

CONNECT_SECONDS = 5.0
# How long a cancel waits for the piece being written before it gives up the connection.
CANCEL_SECONDS = 1.0


@dataclass
class Outgoing:
    """One send on a connection. ``ended`` is set once, by whoever calls ``on_done`` or cancels."""

    number: int
    lease: str
    on_done: OnDone
    bytes: int = 0
    pieces: int = 0
    ended: bool = False
    claimed_at: float | None = None  # when FIN was written


@dataclass
class OutboundCounters:
    """What was sent, over all peers."""

    bytes_sent: int = 0
    pieces_sent: int = 0
    sends_done: int = 0
    sends_failed: int = 0


@dataclass(frozen=True)
class _Write:
    """Something to write for a send: a run of blocks of one layer, or the final claim."""

    outgoing: Outgoing
    header: Header
    first_block: int = 0
    count: int = 0


@dataclass
class _State:
    """What the threads of one peer share, under ``changed``'s lock."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    outgoing: dict[int, Outgoing] = field(default_factory=dict[int, Outgoing])
    writing: Outgoing | None = None
    dead: TercetError | None = None


class Peer:
    """One connection to one receiver."""

    def __init__(
        self,
        address: str,
        memory: KVMemory,
        fingerprint: str,
        timeout: float,
        counters: OutboundCounters,
        on_dead: Callable[[Peer], None],
        cpus: Collection[int] | None,
    ) -> None:
        self._cpus = cpus
        self.address = address
        self._memory = memory
        self._live = LiveTable()
        self._hello = hello(self._live.greeting(fingerprint))
        self._by_reference = False
        self._timeout = timeout
        self._counters = counters
        self._on_dead = on_dead
        self._state = _State()
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._numbers = 0
        self._socket: socket.socket | None = None
        self._reader: threading.Thread | None = None
        self._writer = start_thread("tercet-send", self._write_all, cpus=cpus)

    # ---- called by the engine's threads ----------------------------------------------------------------------

    def open(self, lease: str, on_done: OnDone) -> Outgoing:
        """Begin a send."""
        with self._state.changed:
            self._numbers += 1
            outgoing = Outgoing(self._numbers, lease, on_done)
            dead = self._state.dead
            if dead is None:
                self._state.outgoing[outgoing.number] = outgoing
                self._live.begin(outgoing.number)
        if dead is not None:
            self._end(outgoing, dead)
        return outgoing

    def push(self, outgoing: Outgoing, layer: int, slot: int, blocks: Sequence[int]) -> None:
        """Queue blocks of one layer."""
        size = self._memory.block_bytes
        for first, count in runs(blocks, max(1, MAX_PIECE_BYTES // size)):
            header = Header(Kind.PIECE, outgoing.number, outgoing.lease, layer, slot, slot + count, count * size)
            self._queue.put(_Write(outgoing, header, first, count))
            slot += count

    def finish(self, outgoing: Outgoing, begin: int, end: int) -> None:
        """Queue the claim that ``[begin, end)`` is complete."""
        self._queue.put(_Write(outgoing, Header(Kind.FIN, outgoing.number, outgoing.lease, begin=begin, end=end)))

    def cancel(self, outgoing: Outgoing) -> None:
        """End a send; afterwards its blocks are not read."""
        self._end(outgoing, TransferFailed("the send was cancelled"))
        state = self._state
        with state.changed:
            if state.changed.wait_for(lambda: state.writing is not outgoing, CANCEL_SECONDS):
                return
        # A piece cannot be left half written on a connection that goes on.
        self._die(TransferFailed(f"{self.address} does not take what it is sent"))
        with state.changed:
            state.changed.wait_for(lambda: state.writing is not outgoing)

    def close(self) -> None:
        """End the connection and join its threads."""
        self._die(TransferFailed("the transport was closed"))
        for thread in (self._writer, self._reader):
            if thread is not None and thread is not threading.current_thread():
                thread.join()

    # ---- the writing thread ----------------------------------------------------------------------------------

    def _write_all(self) -> None:
        try:
            sock = self._connect()
            while (item := self._queue.get()) is not None:
                if self._begin_writing(item.outgoing):
                    try:
                        self._write(sock, item)
                    finally:
                        self._end_writing()
        except (OSError, TercetError) as error:
            self._die(TransferFailed(f"{self.address}: {_words(error)}"))
        finally:
            if self._socket is not None:
                self._socket.close()

    def _connect(self) -> socket.socket:
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        sock = socket.create_connection((host, int(port)), CONNECT_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        sock.settimeout(self._timeout)
        with self._state.changed:
            self._socket = sock
            if self._state.dead is not None:
                raise self._state.dead
        sock.sendall(self._hello)
        self._by_reference = _welcomed(sock)
        self._reader = start_thread("tercet-acks", self._read_all, sock.dup(), cpus=self._cpus)
        return sock

    def _begin_writing(self, outgoing: Outgoing) -> bool:
        with self._state.changed:
            if outgoing.ended:
                return False
            self._state.writing = outgoing
            return True

    def _end_writing(self) -> None:
        with self._state.changed:
            self._state.writing = None
            self._state.changed.notify_all()

    def _write(self, sock: socket.socket, item: _Write) -> None:
        outgoing, header = item.outgoing, item.header
        if header.kind is Kind.FIN:
            outgoing.claimed_at = time.monotonic()
            sock.sendall(header.pack())
            return
        data = self._memory.read(header.layer, item.first_block, item.count)
        if self._by_reference:
            reference = msgspec.msgpack.encode(self._live.reference(outgoing.number, data))
            sock.sendall(header._replace(kind=Kind.REFERENCE, nbytes=len(reference)).pack() + reference)
        else:
            _send_both(sock, header.pack(), data)
        outgoing.bytes += data.nbytes
        outgoing.pieces += 1
        self._counters.bytes_sent += data.nbytes
        self._counters.pieces_sent += 1

    # ---- the reading thread ----------------------------------------------------------------------------------

    def _read_all(self, sock: socket.socket) -> None:
        sock.settimeout(self._timeout)
        try:
            with sock:
                while True:
                    header = unpack(self._read(sock, HEADER_BYTES))
                    reason = self._read(sock, header.nbytes).decode(errors="replace") if header.nbytes else ""
                    self._answered(header, reason)
        except (OSError, TercetError) as error:
            self._die(TransferFailed(f"{self.address}: {_words(error)}"))

    def _read(self, sock: socket.socket, size: int) -> bytes:
        return _read_exactly(sock, size, self._require_progress)

    def _require_progress(self) -> None:
        """Silence is fine while nothing is owed; raises when a claim was not answered in time."""
        overdue = time.monotonic() - self._timeout
        with self._state.changed:
            owed = [out.claimed_at for out in self._state.outgoing.values() if out.claimed_at is not None]
        if owed and min(owed) < overdue:
            raise TimeoutError(f"no acknowledgement within {self._timeout:.0f} s")

    def _answered(self, header: Header, reason: str) -> None:
        if header.kind is Kind.REFUSED and header.send == 0:
            raise ProtocolViolation(reason)
        with self._state.changed:
            outgoing = self._state.outgoing.get(header.send)
        if outgoing is None:
            return
        if header.kind is Kind.ACK:
            self._end(outgoing, SendReport(outgoing.bytes, outgoing.pieces))
        elif header.kind is Kind.REFUSED:
            self._end(outgoing, TransferFailed(f"{self.address} refused: {reason}"))
        else:
            raise ProtocolViolation(f"a receiver does not say {header.kind.name}")

    # ---- ends ------------------------------------------------------------------------------------------------

    def _end(self, outgoing: Outgoing, outcome: SendReport | TercetError) -> None:
        with self._state.changed:
            self._state.outgoing.pop(outgoing.number, None)
            # Whoever unpins the blocks does so after this; a reference that is read later is not taken.
            self._live.end(outgoing.number)
            if outgoing.ended:
                return
            outgoing.ended = True
        if isinstance(outcome, SendReport):
            self._counters.sends_done += 1
        else:
            self._counters.sends_failed += 1
        outgoing.on_done(outcome)

    def _die(self, error: TercetError) -> None:
        with self._state.changed:
            if self._state.dead is not None:
                return
            self._state.dead = error
            orphans = list(self._state.outgoing.values())
            sock = self._socket
        self._on_dead(self)
        if sock is not None:
            shut(sock)
        self._queue.put(None)
        for outgoing in orphans:
            self._end(outgoing, error)


def _welcomed(sock: socket.socket) -> bool:
    """Wait for the receiver's first frame; whether it takes references."""

    def too_long() -> None:
        raise TimeoutError("no acknowledgement of the greeting")

    header = unpack(_read_exactly(sock, HEADER_BYTES, too_long))
    if header.kind is Kind.REFUSED:
        raise ProtocolViolation(_read_exactly(sock, header.nbytes, too_long).decode(errors="replace"))
    if header.kind is not Kind.WELCOME:
        raise ProtocolViolation(f"a receiver does not begin with {header.kind.name}")
    return header.begin == 1


def _read_exactly(sock: socket.socket, size: int, on_timeout: Callable[[], None]) -> bytes:
    data = b""
    while len(data) < size:
        try:
            more = sock.recv(size - len(data))
        except TimeoutError:
            on_timeout()
            continue
        if not more:
            raise ConnectionResetError("the receiver closed the connection")
        data += more
    return data


def _send_both(sock: socket.socket, header: bytes, data: memoryview) -> None:
    """Write header and data, from where they are, in as few system calls as it takes."""
    sent = sock.sendmsg([header, data])
    if sent < len(header):
        sock.sendall(header[sent:])
        sent = len(header)
    rest = data[sent - len(header) :]
    while rest.nbytes:
        rest = rest[sock.send(rest) :]


def _words(error: BaseException) -> str:
    if isinstance(error, TercetError):
        return error.message
    if isinstance(error, TimeoutError) and not str(error).startswith("no ack"):
        return "it takes no data"
    return str(error) or type(error).__name__


class TcpSender:
    """Sends by id, over one connection per peer, which is opened on first use and again after it broke."""

    def __init__(self, memory: KVMemory, fingerprint: str, timeout: float, cpus: Collection[int] | None = None) -> None:
        self._cpus = cpus
        self._memory = memory
        self._fingerprint = fingerprint
        self._timeout = timeout
        self._peers: dict[str, Peer] = {}
        self._sends: dict[str, tuple[Peer, Outgoing]] = {}
        self._lock = threading.Lock()
        self.counters = OutboundCounters()

    @property
    def active(self) -> int:
        """Sends under way."""
        return len(self._sends)

    def open(self, send_id: str, address: str, lease: str, on_done: OnDone) -> None:
        """See :meth:`tercet.transport.KVTransport.open`."""

        def done(outcome: SendReport | TercetError) -> None:
            with self._lock:
                self._sends.pop(send_id, None)
            on_done(outcome)

        peer = self._peer(address)
        outgoing = peer.open(lease, done)
        with self._lock:
            if not outgoing.ended:
                self._sends[send_id] = (peer, outgoing)

    def push(self, send_id: str, layer: int, slot: int, blocks: Sequence[int]) -> None:
        """See :meth:`tercet.transport.KVTransport.push`; a send that has ended takes no more."""
        found = self._sends.get(send_id)
        if found is not None:
            found[0].push(found[1], layer, slot, blocks)

    def finish(self, send_id: str, begin: int, end: int) -> None:
        """See :meth:`tercet.transport.KVTransport.finish`."""
        found = self._sends.get(send_id)
        if found is not None:
            found[0].finish(found[1], begin, end)

    def cancel(self, send_id: str) -> None:
        """See :meth:`tercet.transport.KVTransport.cancel`."""
        found = self._sends.get(send_id)
        if found is not None:
            found[0].cancel(found[1])

    def _peer(self, address: str) -> Peer:
        with self._lock:
            peer = self._peers.get(address)
            if peer is None:
                peer = Peer(
                    address, self._memory, self._fingerprint, self._timeout, self.counters, self._forget, self._cpus
                )  # fmt: skip
                self._peers[address] = peer
            return peer

    def _forget(self, peer: Peer) -> None:
        with self._lock:
            if self._peers.get(peer.address) is peer:
                del self._peers[peer.address]

    def close(self) -> None:
        """End every connection."""
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()
