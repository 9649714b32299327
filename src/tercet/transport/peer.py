"""One connection to one receiver: a thread that writes, and one that reads answers.

Blocks are read by the writing thread alone. Two rules keep them safe: a send that has ended is not picked up for
writing, and its owner hears of the end (``on_done``, or :meth:`Peer.cancel` returning) only once the writing thread has
left its blocks.
"""

from __future__ import annotations

import itertools
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from tercet.protocol import BadRequest, TercetError, TransferFailed
from tercet.transport.base import OnDone, SendReport
from tercet.transport.direct import LiveTable
from tercet.transport.frames import (
    HEADER_BYTES,
    MAX_PIECE_BYTES,
    MAX_TEXT_BYTES,
    Header,
    Kind,
    ProtocolViolation,
    hello,
    unpack,
)
from tercet.transport.memory import KVMemory, runs
from tercet.transport.sockets import parse_address, shut, tune
from tercet.transport.threads import start_thread

logger = logging.getLogger(__name__)
CONNECT_SECONDS = 5.0
# How long a cancel waits for the piece being written before it gives up the connection.
CANCEL_SECONDS = 1.0
MAX_TOKENS = 2**32
# Never given twice by a process, whatever the connection: a reference that a receiver reads late, in memory that a
# later connection uses by then, must not find its number there.
_numbers = itertools.count(1 + secrets.randbits(62))


@dataclass
class Outgoing:
    """One send on a connection. ``outcome`` is set once; who sets it, or the writing thread, calls ``on_done``."""

    number: int
    lease: str
    on_done: OnDone
    bytes: int = 0
    pieces: int = 0
    outcome: SendReport | TercetError | None = None
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
    socket: socket.socket | None = None


class Peer:
    """One connection to one receiver; it is opened by :meth:`start` and not again after it broke."""

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
        self._reader: threading.Thread | None = None
        self._writer: threading.Thread | None = None

    def start(self) -> None:
        """Connect, in a thread of its own."""
        try:
            self._writer = start_thread("tercet-send", self._write_all, cpus=self._cpus)
        except RuntimeError as error:  # the system has no more threads
            self._break(error)

    # ---- called by the engine's threads ----------------------------------------------------------------------

    def open(self, lease: str, on_done: OnDone) -> Outgoing | None:
        """Begin a send; ``None`` if the connection is over."""
        with self._state.changed:
            if self._state.dead is not None:
                return None
            outgoing = Outgoing(next(_numbers), lease, on_done)
            self._state.outgoing[outgoing.number] = outgoing
            self._live.begin(outgoing.number)
            return outgoing

    def push(self, outgoing: Outgoing, layer: int, slot: int, blocks: Sequence[int]) -> None:
        """Queue blocks of one layer."""
        memory, size = self._memory, self._memory.block_bytes
        inside = all(0 <= block < memory.num_blocks for block in blocks)
        if not (inside and 0 <= layer < memory.num_layers and 0 <= slot < MAX_TOKENS - len(blocks)):
            reason = f"slot {slot}, layer {layer}, blocks {list(blocks)!r:.80} are not in this rank's KV"
            return self._end(outgoing, BadRequest(reason))
        for first, count in runs(blocks, max(1, MAX_PIECE_BYTES // size)):
            header = Header(Kind.PIECE, outgoing.number, outgoing.lease, layer, slot, slot + count, count * size)
            self._queue.put(_Write(outgoing, header, first, count))
            slot += count
        return None

    def finish(self, outgoing: Outgoing, begin: int, end: int) -> None:
        """Queue the claim that ``[begin, end)`` is complete."""
        if not 0 <= begin <= end < MAX_TOKENS:
            return self._end(outgoing, BadRequest(f"[{begin}, {end}) is no range of tokens"))
        self._queue.put(_Write(outgoing, Header(Kind.FIN, outgoing.number, outgoing.lease, begin=begin, end=end)))
        return None

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
        _join(self._writer)
        _join(self._reader)  # looked up now, since the writing thread starts it

    # ---- the writing thread ----------------------------------------------------------------------------------

    def _write_all(self) -> None:
        try:
            sock = self._connect()
            while (item := self._queue.get()) is not None:
                if self._begin_writing(item.outgoing):
                    try:
                        self._write(sock, item)
                    finally:
                        self._end_writing(item.outgoing)
        except Exception as error:
            self._break(error)
        finally:
            with self._state.changed:
                if self._state.socket is not None:
                    self._state.socket.close()
                    self._state.socket = None

    def _connect(self) -> socket.socket:
        with self._state.changed:
            if self._state.dead is not None:
                raise self._state.dead
        sock = socket.create_connection(parse_address(self.address), CONNECT_SECONDS)
        with self._state.changed:
            self._state.socket = sock
            if self._state.dead is not None:
                raise self._state.dead
        tune(sock)
        sock.settimeout(self._timeout)
        sock.sendall(self._hello)
        self._by_reference = _welcomed(sock)
        self._reader = start_thread("tercet-acks", self._read_all, sock.dup(), cpus=self._cpus)
        return sock

    def _begin_writing(self, outgoing: Outgoing) -> bool:
        with self._state.changed:
            if outgoing.outcome is not None:
                return False
            self._state.writing = outgoing
            return True

    def _end_writing(self, outgoing: Outgoing) -> None:
        with self._state.changed:
            self._state.writing = None
            self._state.changed.notify_all()
            ended = outgoing.outcome is not None
        if ended:
            self._tell(outgoing)

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
        sock.settimeout(self._timeout / 4)  # how often the oldest claim's age is looked at
        try:
            with sock:
                while True:
                    header = unpack(_read_exactly(sock, HEADER_BYTES, self._require_progress))
                    self._answered(header, _text(sock, header, self._require_progress))
        except Exception as error:
            self._break(error)

    def _require_progress(self) -> None:
        """Silence is fine while nothing is owed; raises when a claim was not answered in time."""
        overdue = time.monotonic() - self._timeout
        with self._state.changed:
            owed = [out.claimed_at for out in self._state.outgoing.values() if out.claimed_at is not None]
        if owed and min(owed) < overdue:
            raise TransferFailed(f"no acknowledgement within {self._timeout:.0f} s")

    def _answered(self, header: Header, reason: str) -> None:
        if header.kind is Kind.REFUSED and header.send == 0:
            raise ProtocolViolation(reason)
        with self._state.changed:
            outgoing = self._state.outgoing.get(header.send)
        if header.kind not in (Kind.ACK, Kind.REFUSED):
            raise ProtocolViolation(f"a receiver does not say {header.kind.name}")
        if outgoing is None:
            return  # cancelled meanwhile
        if header.kind is Kind.REFUSED:
            self._end(outgoing, TransferFailed(f"{self.address} refused: {reason}"))
        elif outgoing.claimed_at is None:
            raise ProtocolViolation("an acknowledgement of something that was not claimed")
        else:
            self._end(outgoing, SendReport(outgoing.bytes, outgoing.pieces))

    # ---- ends ------------------------------------------------------------------------------------------------

    def _end(self, outgoing: Outgoing, outcome: SendReport | TercetError) -> None:
        with self._state.changed:
            self._state.outgoing.pop(outgoing.number, None)
            # Whoever unpins the blocks does so after this; a reference that is read later is not taken.
            self._live.end(outgoing.number)
            if outgoing.outcome is not None:
                return
            outgoing.outcome = outcome
            if self._state.writing is outgoing:
                return  # the writing thread tells, once it has left the blocks
        self._tell(outgoing)

    def _tell(self, outgoing: Outgoing) -> None:
        outcome = outgoing.outcome
        assert outcome is not None
        if isinstance(outcome, SendReport):
            self._counters.sends_done += 1
        else:
            self._counters.sends_failed += 1
        try:
            outgoing.on_done(outcome)
        except Exception:
            # The caller's mistake must not take the connection from other sends.
            logger.exception("on_done of a send to %s failed", self.address)

    def _break(self, error: Exception) -> None:
        if not isinstance(error, OSError | TercetError):
            logger.error("the connection to %s failed", self.address, exc_info=error)
        self._die(TransferFailed(f"{self.address}: {_words(error)}"))

    def _die(self, error: TercetError) -> None:
        with self._state.changed:
            if self._state.dead is not None:
                return
            self._state.dead = error
            orphans = list(self._state.outgoing.values())
            if self._state.socket is not None:
                shut(self._state.socket)
        self._on_dead(self)
        self._queue.put(None)
        for outgoing in orphans:
            self._end(outgoing, error)


def _welcomed(sock: socket.socket) -> bool:
    """Wait for the receiver's first frame; whether it takes references."""

    def too_long() -> None:
        raise TransferFailed("no acknowledgement of the greeting")

    header = unpack(_read_exactly(sock, HEADER_BYTES, too_long))
    if header.kind is Kind.REFUSED:
        raise ProtocolViolation(_text(sock, header, too_long))
    if header.kind is not Kind.WELCOME:
        raise ProtocolViolation(f"a receiver does not begin with {header.kind.name}")
    return header.begin == 1


def _text(sock: socket.socket, header: Header, on_timeout: Callable[[], None]) -> str:
    """The body of an answer; only a refusal has one."""
    if header.nbytes > (MAX_TEXT_BYTES if header.kind is Kind.REFUSED else 0):
        raise ProtocolViolation(f"{header.kind.name} of {header.nbytes} bytes")
    return _read_exactly(sock, header.nbytes, on_timeout).decode(errors="replace")


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


def _join(thread: threading.Thread | None) -> None:
    if thread is not None and thread is not threading.current_thread():
        thread.join()


def _words(error: BaseException) -> str:
    if isinstance(error, TercetError):
        return error.message
    if isinstance(error, TimeoutError):
        return "it does not answer or takes no data"
    return str(error) or type(error).__name__
