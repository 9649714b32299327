"""One receiver as its sender sees it: a session of one or more connections, and a queue of frames for them.

Blocks are read by the writing threads, or by the receiver. Two rules keep them safe: a send that has ended is not
picked up for writing, and its owner hears of the end (``on_done``, or :meth:`Peer.cancel` returning) only once every
writing thread has left its blocks and its live word is cleared.
"""

from __future__ import annotations

import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tercet.protocol import BadRequest, TercetError, TransferFailed
from tercet.transport.backends import TCP
from tercet.transport.base import OnDone, SendReport
from tercet.transport.frames import MAX_TEXT_BYTES, Header, Kind, ProtocolViolation
from tercet.transport.mapping import HeadSlice
from tercet.transport.origin import Origin
from tercet.transport.outgoing import Item, Outgoing, by_value, frame_bytes, next_number, units
from tercet.transport.posting import Post
from tercet.transport.sockets import parse_address, read_frame, send_all, shut, tune, wait_in_calls
from tercet.transport.threads import start_thread

logger = logging.getLogger(__name__)
CONNECT_SECONDS = 5.0
# How long a cancel waits for the frame being written before it gives up the connection.
CANCEL_SECONDS = 1.0
MAX_TOKENS = 2**32
MAX_REFERENCED_BLOCKS = 65536
# Small frames are gathered up to so many, or so many bytes, into one system call.
MAX_GATHERED, GATHERED_BYTES = 64, 512 * 1024


@dataclass
class _State:
    """What the threads of one peer share, under ``changed``'s lock."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    outgoing: dict[int, Outgoing] = field(default_factory=dict[int, Outgoing])
    sockets: list[socket.socket] = field(default_factory=list[socket.socket])
    threads: list[threading.Thread] = field(default_factory=list[threading.Thread])
    dead: TercetError | None = None


class Peer:
    """A session with one receiver; it is opened by :meth:`start` and not again after it broke."""

    def __init__(self, addresses: Sequence[str], origin: Origin, on_dead: Callable[[Peer], None]) -> None:
        self.addresses = tuple(addresses)
        self._origin = origin
        self._on_dead = on_dead
        self._session = secrets.token_hex(16)
        self._transport: str | None = None
        self._state = _State()
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        # Set once it is agreed that KV goes by reference; from then on the queue is not used.
        self._post: Post | None = None
        self._posting = threading.Lock()

    @property
    def transport(self) -> str | None:
        """How KV travels, once that is agreed: ``tcp``, or the backend by which the receiver reads it."""
        return self._transport

    def start(self) -> None:
        """Connect, in a thread of its own."""
        self._start_thread("tercet-send", self._run_first)

    # ---- called by the engine's threads ----------------------------------------------------------------------

    def open(self, lease: str, head_slice: HeadSlice, on_done: OnDone) -> Outgoing | None:
        """Begin a send; ``None`` if the session is over."""
        with self._state.changed:
            if self._state.dead is not None:
                return None
            outgoing = Outgoing(next_number(), lease, head_slice, on_done)
            self._state.outgoing[outgoing.number] = outgoing
            self._origin.region.begin(outgoing.number)
            return outgoing

    def push(self, outgoing: Outgoing, layers: range, slot: int, blocks: Sequence[int]) -> None:
        """Queue blocks of neighbouring layers."""
        shape = self._origin.region.shape
        inside = not blocks or (min(blocks) >= 0 and max(blocks) < shape.num_blocks)
        known = layers.step == 1 and 0 <= layers.start <= layers.stop <= len(shape.planes)
        if not (inside and known and 0 <= slot < MAX_TOKENS - len(blocks)):
            reason = f"slot {slot}, {layers} of layers, blocks {list(blocks)!r:.80} are not in this rank's KV"
            return self._end(outgoing, BadRequest(reason))
        size = outgoing.head_slice.size
        total = len(layers) * len(blocks) * size
        limit = (
            max(1, frame_bytes(total, self._origin.streams) // size) if self._post is None else MAX_REFERENCED_BLOCKS
        )
        numbers = np.array(blocks, dtype=np.int64)
        for some, cut in units(layers, len(blocks), limit):
            item = Item(outgoing, slot + cut.start, slot + cut.stop, some, numbers[cut])
            outgoing.frames += 1
            outgoing.bytes += item.nbytes
            self._put(item)
        return None

    def finish(self, outgoing: Outgoing, begin: int, end: int) -> None:
        """Queue the claim that ``[begin, end)`` is complete."""
        if not 0 <= begin <= end < MAX_TOKENS:
            return self._end(outgoing, BadRequest(f"[{begin}, {end}) is no range of tokens"))
        self._put(Item(outgoing, begin, end))
        return None

    def cancel(self, outgoing: Outgoing) -> None:
        """End a send; afterwards its blocks are not read."""
        self._end(outgoing, TransferFailed("the send was cancelled"))
        state = self._state
        with state.changed:
            if state.changed.wait_for(lambda: not outgoing.writers, CANCEL_SECONDS):
                return
        # A frame cannot be left half written on a connection that goes on.
        self._die(TransferFailed(f"{self.addresses[0]} does not take what it is sent"))
        with state.changed:
            state.changed.wait_for(lambda: not outgoing.writers)

    def close(self) -> None:
        """End the session and join its threads."""
        self._die(TransferFailed("the transport was closed"))
        with self._state.changed:
            threads = list(self._state.threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    # ---- connecting ------------------------------------------------------------------------------------------

    def _start_thread(self, name: str, target: Callable[..., None], *args: object) -> None:
        with self._state.changed:
            if self._state.dead is not None:
                return  # closed before it was started: nobody would join the thread
            try:
                self._state.threads.append(start_thread(name, target, *args))
                return
            except RuntimeError as error:  # the system has no more threads
                failure = error
        self._break(failure)

    def _run_first(self) -> None:
        try:
            with self._connect(0) as sock:
                self._transport = self._agree(sock)
                self._settle(sock)
                self._start_thread("tercet-acks", self._read_all, sock.dup())
                if self._transport != TCP:
                    return self._post_all(sock)
                for stream in range(1, self._origin.streams):
                    self._start_thread("tercet-send", self._run_further, stream)
                self._write_all(sock)
        except Exception as error:
            self._break(error)

    def _run_further(self, stream: int) -> None:
        try:
            with self._connect(stream) as sock:
                self._origin.join(sock, self._session, stream)
                self._settle(sock)
                self._write_all(sock)
        except Exception as error:
            self._break(error)

    def _connect(self, stream: int) -> socket.socket:
        address = parse_address(self.addresses[stream % len(self.addresses)])
        sock = socket.create_connection(address, CONNECT_SECONDS)
        with self._state.changed:
            if self._state.dead is not None:
                sock.close()
                raise self._state.dead
            self._state.sockets.append(sock)
        tune(sock)
        sock.settimeout(self._origin.timeout)
        return sock

    def _settle(self, sock: socket.socket) -> None:
        # Reading wakes up now and then to look at the oldest claim's age.
        wait_in_calls(sock, self._origin.timeout, self._origin.timeout / 4)

    def _agree(self, sock: socket.socket) -> str:
        """Begin the session; returns how KV is to travel."""
        word = next_number()
        self._origin.region.begin(word)
        try:
            return self._origin.join(sock, self._session, 0, word).transport
        finally:
            self._origin.region.end(word)

    # ---- frames by reference ---------------------------------------------------------------------------------

    def _put(self, item: Item) -> None:
        if self._post is None:
            with self._posting:
                if self._post is None:
                    return self._queue.put(item)
        try:
            self._post_one(self._post, item)
        except OSError as error:
            self._break(error)
        return None

    def _post_one(self, post: Post, item: Item) -> None:
        if item.outgoing.outcome is not None:
            return  # it ended meanwhile
        if item.is_claim:
            item.outgoing.claimed_at = time.monotonic()
            post.send(item.claim())
        else:
            post.send(item.reference())
            self._origin.counters.count(bytes_sent=item.nbytes, chunks_sent=1)

    def _post_all(self, sock: socket.socket) -> None:
        """What was queued meanwhile; then what callers cannot write at once."""
        post = Post(sock)
        with self._posting:
            while not self._queue.empty():
                item = self._queue.get()
                if item is not None:
                    self._post_one(post, item)
            self._post = post
        if self._state.dead is None:  # else who ended the session may have done so before there was a post to close
            post.deliver(self._origin.timeout)

    # ---- the writing threads ---------------------------------------------------------------------------------

    def _write_all(self, sock: socket.socket) -> None:
        while (item := self._queue.get()) is not None:
            batch = [item, *self._gather(item)]
            held = [each for each in batch if self._begin_writing(each.outgoing)]
            try:
                if held:
                    self._write(sock, held)
            finally:
                self._end_writing(held)
        self._queue.put(None)  # for the next one of these threads

    def _gather(self, first: Item) -> list[Item]:
        """More of what is queued, as long as the frames are small."""
        found: list[Item] = []
        total = first.nbytes
        while len(found) < MAX_GATHERED and total < GATHERED_BYTES:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if item is None:
                self._queue.put(None)
                break
            found.append(item)
            total += item.nbytes
        return found

    def _begin_writing(self, outgoing: Outgoing) -> bool:
        with self._state.changed:
            if outgoing.outcome is not None:
                return False
            outgoing.writers += 1
            return True

    def _end_writing(self, items: Sequence[Item]) -> None:
        with self._state.changed:
            for item in items:
                item.outgoing.writers -= 1
            self._state.changed.notify_all()
        # Only now: one of them may, when it is told, cancel another one, and wait for its writers.
        for outgoing in {item.outgoing.number: item.outgoing for item in items}.values():
            self._tell(outgoing)

    def _write(self, sock: socket.socket, items: Sequence[Item]) -> None:
        for item in items:
            if item.is_claim:
                item.outgoing.claimed_at = time.monotonic()
        send_all(sock, by_value(items, self._origin.region))
        pieces = [item for item in items if not item.is_claim]
        self._origin.counters.count(bytes_sent=sum(item.nbytes for item in pieces), chunks_sent=len(pieces))

    # ---- the reading thread ----------------------------------------------------------------------------------

    def _read_all(self, sock: socket.socket) -> None:
        try:
            with sock:
                while True:
                    self._answered(*read_frame(sock, MAX_TEXT_BYTES, self._require_progress))
        except Exception as error:
            self._break(error)

    def _require_progress(self) -> None:
        """Silence is fine while nothing is owed; raises when a claim was not answered in time."""
        overdue = time.monotonic() - self._origin.timeout
        with self._state.changed:
            owed = [out.claimed_at for out in self._state.outgoing.values() if out.claimed_at is not None]
        if owed and min(owed) < overdue:
            raise TransferFailed(f"no acknowledgement within {self._origin.timeout:.0f} s")

    def _answered(self, header: Header, body: bytes) -> None:
        reason = body.decode(errors="replace")
        if header.kind is Kind.REFUSED and header.send == 0:
            raise ProtocolViolation(reason)
        with self._state.changed:
            outgoing = self._state.outgoing.get(header.send)
        if header.kind not in (Kind.ACK, Kind.REFUSED):
            raise ProtocolViolation(f"a receiver does not say {header.kind.name} here")
        if outgoing is None:
            return  # cancelled meanwhile
        if header.kind is Kind.REFUSED:
            self._end(outgoing, TransferFailed(f"{self.addresses[0]} refused: {reason}"))
        elif outgoing.claimed_at is None:
            raise ProtocolViolation("an acknowledgement of something that was not claimed")
        else:
            self._end(outgoing, SendReport(outgoing.bytes, outgoing.frames, self._transport or ""))

    # ---- ends ------------------------------------------------------------------------------------------------

    def _end(self, outgoing: Outgoing, outcome: SendReport | TercetError) -> None:
        with self._state.changed:
            self._state.outgoing.pop(outgoing.number, None)
            # Whoever unpins the blocks does so after this; a receiver that reads them later does not take them.
            self._origin.region.end(outgoing.number)
            if outgoing.outcome is None:
                outgoing.outcome = outcome
        self._tell(outgoing)

    def _tell(self, outgoing: Outgoing) -> None:
        """Call ``on_done``, if the send has ended and nobody reads its blocks; once."""
        with self._state.changed:
            outcome = outgoing.outcome
            if outcome is None or outgoing.writers or outgoing.told:
                return
            outgoing.told = True
        done = isinstance(outcome, SendReport)
        self._origin.counters.count(sends_done=done, sends_failed=not done)
        try:
            outgoing.on_done(outcome)
        except Exception:
            # The caller's mistake must not take the connection from other sends.
            logger.exception("on_done of a send to %s failed", self.addresses[0])

    def _break(self, error: Exception) -> None:
        if not isinstance(error, OSError | TercetError):
            logger.error("the connection to %s failed", self.addresses[0], exc_info=error)
        self._die(TransferFailed(f"{self.addresses[0]}: {_words(error)}"))

    def _die(self, error: TercetError) -> None:
        with self._state.changed:
            if self._state.dead is not None:
                return
            self._state.dead = error
            orphans = list(self._state.outgoing.values())
            sockets = list(self._state.sockets)
        for sock in sockets:
            shut(sock)
        self._origin.counters.count(sessions_lost=1)
        self._on_dead(self)
        self._queue.put(None)
        if self._post is not None:
            self._post.close()
        for outgoing in orphans:
            self._end(outgoing, error)


def _words(error: BaseException) -> str:
    if isinstance(error, TercetError):
        return error.message
    if isinstance(error, TimeoutError):
        return "it does not answer or takes no data"
    return str(error) or type(error).__name__
