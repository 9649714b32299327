"""One receiver as its sender sees it: a session that describes blocks for the receiver to read.

The receiver reads the blocks at any later time. Two rules keep them safe. Requests for a send that has ended are not
answered with its blocks. And the owner is notified of the end (``on_done``, or :meth:`TransferPeer.cancel` returning)
only after no thread here writes the blocks to a connection and the generation word is cleared: from then on, a receiver
does not accept blocks that it reads by itself.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tercet.protocol import BadRequest, Content, TercetError, TransferFailed
from tercet.transport.backends import tcp
from tercet.transport.backends.reading import HostBackend
from tercet.transport.local_rank import LocalRank, chosen, greet
from tercet.transport.peer_messages import (
    BLOCK_NUMBER,
    FROM_RECEIVER,
    Acknowledged,
    Challenge,
    FromReceiver,
    MessageSplitter,
    ProtocolViolation,
    ReadDescriptors,
    ReadRequest,
    Refused,
    SendBegin,
    SendEnd,
    Welcome,
    framed,
)
from tercet.transport.region import HeadSlice, Numbers, PlaneRun, is_core_word

if TYPE_CHECKING:
    from tercet.transport.agent.agent_messages import SendDone
from tercet.transport.sockets import (
    UNIX,
    Post,
    Vector,
    connect_unix,
    is_local,
    parse_address,
    shut,
    start_thread,
    tune,
    wait_in_calls,
)

# A number is never repeated in a process, on any connection: a reader that checks a generation word late must not find
# the number of a send that has ended. The core's words have separate numbers.
send_numbers = itertools.filterfalse(is_core_word, itertools.count(1 + secrets.randbits(62)))


@dataclass(frozen=True)
class SendReport:
    """Result of a send that is in place at the receiver: bytes of KV, number of chunks, and the transport."""

    bytes: int
    chunks: int
    transport: str = ""

    @classmethod
    def of_all(cls, parts: Collection[SendDone | SendReport]) -> SendReport:
        """Return the sum of the reports of a send's parts, with the names of all their transports."""
        ways = {way for part in parts for way in part.transport.split("+") if way}
        return cls(sum(part.bytes for part in parts), sum(part.chunks for part in parts), "+".join(sorted(ways)))


OnDone = Callable[[SendReport | TercetError], None]


@dataclass(eq=False)
class RankSend:
    """A send of ``content`` to one receiving rank, under ``lease``."""

    lease: str
    content: Content
    head_slice: HeadSlice  # its part of each block
    # Called once, without locks of the transport.
    on_done: OnDone
    # Identifies the send. It is also the value of the generation word, which is written here while the blocks are
    # pinned, or by the core (:class:`.region.CoreWords`), whose number must not be cleared here.
    number: int = field(default_factory=lambda: next(send_numbers))
    planes: tuple[PlaneRun, ...] = ()  # those that the rank gets, all of them if empty
    traceparent: str = ""  # its place in a sampled trace, or empty
    chunks: list[ReadDescriptors] = field(default_factory=list[ReadDescriptors])  # the receiver was asked to read these
    # The memory of chunks that are likely to be requested next; each is used once.
    prepared: dict[int, AbstractContextManager[Vector]] = field(
        default_factory=dict[int, AbstractContextManager[Vector]]
    )
    begun: bool = False  # True once the receiver has the begin message
    finished_at: float | None = None  # when the receiver got the end message
    readers: int = 0  # threads that are writing its blocks to the receiver
    outcome: SendReport | TercetError | None = None
    reported: bool = False  # on_done was called

    def beginning(self) -> bytes:
        """Return the framed begin message, or empty bytes if the receiver has it."""
        if self.begun:
            return b""
        self.begun = True
        planes = tuple((run.target, run.target + run.length) for run in self.planes)
        return framed(SendBegin(self.number, self.lease, self.content, planes, self.traceparent))

    def ending(self, begin: int, end: int) -> SendEnd:
        """Return the end message: ``[begin, end)`` is complete with the chunks so far."""
        part = self.head_slice
        return SendEnd(self.number, self.lease, begin, end, len(self.chunks), part.part, part.parts)

    def next_chunks(self, run: PlaneRun, slot: int, blocks: Numbers, limit: int) -> Iterator[ReadDescriptors]:
        """Yield a push as chunks of at most ``limit`` blocks; add each to ``chunks`` before the next is made."""
        part, away = self.head_slice, run.source - run.target
        for some, cut in cuts(range(run.target, run.target + run.length), len(blocks), limit):
            yield ReadDescriptors(
                self.number, self.lease, len(self.chunks), some.start, len(some), slot + cut.start, slot + cut.stop,
                blocks[cut].astype(BLOCK_NUMBER).tobytes(), part.source_offset, part.size, part.part, part.parts,
                source=some.start + away if away else None,
            )  # fmt: skip


def cuts(layers: range, count: int, limit: int) -> Iterator[tuple[range, slice]]:
    """Cut ``count`` blocks in each layer into chunks of at most ``limit``; yield layers, and a slice of their blocks.

    A chunk has several whole layers if they fit, or a part of one layer's blocks.
    """
    if not count:
        return
    at_once, parts = max(1, limit // count), -(-count // limit)
    size = -(-count // parts)
    for first in range(0, len(layers), at_once):
        for start in range(0, count, size):
            yield layers[first : first + at_once], slice(start, min(start + size, count))


logger = logging.getLogger(__name__)
CONNECT_SECONDS = 5.0
# Time that a cancel waits for the chunk being written, in seconds; then it ends the session.
CANCEL_SECONDS = 1.0
MAX_TOKENS = 2**32
# Limits of one message, if no connection has to carry the bytes.
MAX_BLOCKS_IN_CHUNK, MAX_CHUNK_BYTES = 65536, 64 * 1024 * 1024


class TransferPeer:
    """A session with one receiver. :meth:`start` opens it; after it has broken it is not opened again."""

    def __init__(self, addresses: Sequence[str], rank: LocalRank, on_dead: Callable[[TransferPeer], None]) -> None:
        self.addresses = tuple(addresses)
        self._rank, self._memory = rank, rank.memory
        self._on_dead = on_dead
        self._session = secrets.token_hex(16)
        self.transport: str | None = None  # the agreed transport, None before
        self._longest = tcp.MAX_CHUNK_BYTES  # bytes of a chunk, likewise
        self._changed = threading.Condition()
        self._sends: dict[int, RankSend] = {}
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._dead: TercetError | None = None
        self._moved_at = time.monotonic()  # time of the last written chunk or received answer
        # Pushes before the transport is agreed; from then on callers write to the post themselves.
        self._waiting: list[tuple[RankSend, Callable[[Post], None]]] = []
        self._post: Post | None = None
        self._posting = threading.Lock()

    def start(self) -> None:
        """Connect, in a separate thread."""
        self._start_thread("tercet-send", self._run)

    # ---- called by the engine's threads ------------------------------------------------------------------------------

    def open(self, send: RankSend) -> bool:
        """Begin a send; return False if the session has already ended."""
        with self._changed:
            if self._dead is not None:
                return False
            self._sends[send.number] = send
            # Before the first chunk is described: the receiver looks for the word after each read.
            if not is_core_word(send.number):
                self._rank.region.set_word(send.number)
            return True

    def push(self, send: RankSend, layers: range, slot: int, blocks: Sequence[int]) -> None:
        """Tell the receiver to read blocks of neighbouring layers."""
        shape = self._rank.region.shape
        inside = not blocks or (min(blocks) >= 0 and max(blocks) < shape.num_blocks)
        known = layers.step == 1 and 0 <= layers.start <= layers.stop <= len(shape.planes)
        if not (inside and known and 0 <= slot < MAX_TOKENS - len(blocks)):
            reason = f"slot {slot}, {layers} of layers, blocks {list(blocks)!r:.80} are not in this rank's KV"
            return self._end(send, BadRequest(reason))
        wanted = np.array(blocks, dtype=np.int64)

        # It runs at once, or when the transport is agreed, which decides how large a chunk may be.
        def write(post: Post) -> None:
            runs = [PlaneRun(layers.start, layers.start, len(layers))]
            if send.planes:  # if other stages get these layers, this receiver needs no chunk
                runs = [found for run in send.planes if (found := run.within(layers)) is not None]
            size = send.head_slice.size
            limit = max(1, min(MAX_BLOCKS_IN_CHUNK, MAX_CHUNK_BYTES // size))
            frames = list[bytes]()
            for run in runs:
                if self.transport == tcp.TcpBackend.name or self._rank.staged is not None:
                    nbytes = run.length * len(wanted) * size
                    most = tcp.chunk_bytes(nbytes, self._rank.settings.streams, self._longest)
                    limit = max(1, min(MAX_BLOCKS_IN_CHUNK, most // size))
                for chunk in send.next_chunks(run, slot, wanted, limit):
                    send.chunks.append(chunk)
                    frames.append(framed(chunk))
                    self._rank.counters.count(bytes_sent=chunk.nbytes, chunks_sent=1)
            # At once: a receiver that wakes up for the first chunk alone would read it over one connection.
            if frames:
                post.send(send.beginning() + b"".join(frames))
                # Now, since the request for it is on its way, and the thread that answers it could begin only then.
                self._prepare(send, send.chunks[-len(frames) :])

        return self._say(send, write)

    def _prepare(self, send: RankSend, chunks: Sequence[ReadDescriptors]) -> None:
        """Find the memory of the first of some chunks in advance, if connections carry it."""
        if self.transport == tcp.TcpBackend.name and self._rank.staged is None:
            for chunk in chunks[: tcp.REQUESTS_AHEAD * self._rank.settings.streams]:
                send.prepared[chunk.chunk] = self._memory_of(chunk)

    def finish(self, send: RankSend, begin: int, end: int) -> None:
        """Tell the receiver that ``[begin, end)`` is complete."""
        if not 0 <= begin <= end < MAX_TOKENS:
            return self._end(send, BadRequest(f"[{begin}, {end}) is not a range of tokens"))

        def write(post: Post) -> None:
            send.finished_at = time.monotonic()
            post.send(send.beginning() + framed(send.ending(begin, end)))

        return self._say(send, write)

    def cancel(self, send: RankSend) -> None:
        """End a send; blocks that a receiver reads after this are not accepted."""
        self._end(send, TransferFailed("the send was cancelled"))
        with self._changed:
            if self._changed.wait_for(lambda: not send.readers, CANCEL_SECONDS):
                return
        # A half-written chunk would corrupt a connection that continues.
        self._die(TransferFailed("the receiver does not read the data sent to it"))
        with self._changed:
            self._changed.wait_for(lambda: not send.readers)

    def close(self) -> None:
        """End the session and join its threads."""
        self._die(TransferFailed("the transport was closed"))
        with self._changed:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    # ---- connecting --------------------------------------------------------------------------------------------------

    def _start_thread(self, name: str, target: Callable[..., None], *args: object) -> None:
        with self._changed:
            if self._dead is not None:
                return  # closed before it was started: the thread would not be joined
            try:
                self._threads.append(start_thread(name, target, *args))
                return
            except RuntimeError as error:  # the system has no more threads
                failure = error
        self._break(failure)

    def _run(self) -> None:
        try:
            with self._kept(self._connect_first()) as sock:
                answers = ReceiverAnswers(sock, self._rank.settings.timeout)
                self.transport = self._agree(sock, answers)
                # A duplicate descriptor, which the other thread closes.
                self._start_thread("tercet-answers", self._take_answers, answers, sock.dup())
                if self.transport == tcp.TcpBackend.name:
                    for stream in range(1, self._rank.settings.streams + 1):
                        self._start_thread("tercet-serve", self._serve, stream)
                # Send the waiting messages; then those that callers could not write at once.
                post = Post(sock)
                try:
                    with self._posting:
                        for send, write in self._waiting:
                            if send.number in self._sends:
                                write(post)
                        self._waiting.clear()
                        self._post = post
                    if self._dead is None:  # otherwise the session may have ended before the post existed
                        post.deliver(self._rank.settings.timeout, lambda: self._moved_at)
                finally:
                    post.close()  # before its socket is closed: callers may be writing
        except Exception as error:
            self._break(error)

    def _connect_first(self) -> socket.socket:
        """Connect by a Unix socket if it can carry our memory and leads to the receiver, else by TCP."""
        # Only shared memory needs a Unix socket: a descriptor passes over no other connection.
        if self._host is None:
            return self._connect(0)
        reason = "the receiver has no Unix socket"
        for address in self.addresses:
            if address.startswith(UNIX):
                try:
                    return self._opened(connect_unix(address, CONNECT_SECONDS))
                except OSError as error:
                    reason = str(error)
        if len(self._rank.backends) == 1:
            raise TransferFailed(f"host: the receiver's Unix socket cannot be reached from here: {reason}")
        logger.info("%s does not read KV through shared memory: %s", self.addresses[0], reason)
        return self._connect(0)

    def _connect(self, stream: int) -> socket.socket:
        found = [address for address in self.addresses if not address.startswith(UNIX)]
        if not found:
            raise TransferFailed("the receiver has no address of a kind that this rank can connect to")
        return self._opened(socket.create_connection(parse_address(found[stream % len(found)]), CONNECT_SECONDS))

    def _opened(self, sock: socket.socket) -> socket.socket:
        with self._changed:
            if self._dead is not None:
                sock.close()
                raise self._dead
            self._sockets.append(sock)
        return sock

    @contextmanager
    def _kept(self, sock: socket.socket) -> Generator[socket.socket]:
        """Close the socket on exit, but not while another thread shuts it down: its descriptor could be reused."""
        try:
            tune(sock)
            sock.settimeout(self._rank.settings.timeout)
            yield sock
        finally:
            with self._changed:
                self._sockets.remove(sock)
                sock.close()

    @property
    def _host(self) -> HostBackend | None:
        return next((each for each in self._rank.backends if isinstance(each, HostBackend)), None)

    def _agree(self, sock: socket.socket, answers: ReceiverAnswers) -> str:
        """Begin the session; return the chosen transport."""
        memory = self._host if sock.family == socket.AF_UNIX else None
        offers = {each.name: each.offer() for each in self._rank.backends if each is memory or each is not self._host}
        word = next(send_numbers)
        # The receiver must find it by the transport that it chooses: so it knows that it reads this region.
        self._rank.region.set_word(word)
        try:
            challenge = answers.expect(Challenge)
            greeting = greet(self._rank, challenge, self._session, 0, offers, word)
            data = framed(greeting)
            if memory is not None and memory.memory is not None:
                data = data[socket.send_fds(sock, [data], [memory.memory]) :]
            if data:  # a receiver that has refused already does not accept even an empty message
                sock.sendall(data)
            welcome = answers.expect(Welcome)
            transport = chosen(self._rank, challenge, greeting, welcome)
            if self._rank.staged is None:
                longest = tcp.LOCAL_CHUNK_BYTES if is_local(sock) else tcp.LONGEST_CHUNK_BYTES
                self._longest = min(longest, welcome.longest)
            return transport
        finally:
            self._rank.region.clear_word(word)

    def _serve(self, stream: int) -> None:
        """Open one of the connections on which a receiver requests chunks, and answer its requests."""
        timeout = self._rank.settings.timeout
        try:
            with self._kept(self._connect(stream)) as sock:
                challenge = ReceiverAnswers(sock, timeout).expect(Challenge)
                sock.sendall(framed(greet(self._rank, challenge, self._session, stream, {}, 0)))
                wait_in_calls(sock, timeout, timeout)
                tcp.serve(sock, self._rank.region, self._reading)
        except Exception as error:
            self._break(error)

    @contextmanager
    def _reading(self, request: ReadRequest) -> Generator[Vector | None]:
        """Register a read of a requested chunk while entered; yield its memory, or None if its send has ended."""
        with self._changed:
            send = self._sends.get(request.send)
            # Counted under the lock: a send ends only when no thread writes its blocks.
            if send is not None:
                send.readers += 1
        if send is None:
            yield None
            return
        try:
            with self._places(send, request) as found:
                yield found
        finally:
            with self._changed:
                send.readers -= 1
                self._moved_at = time.monotonic()
                self._changed.notify_all()
            self._report(send)

    def _places(self, send: RankSend, request: ReadRequest) -> AbstractContextManager[Vector]:
        if request.chunk >= len(send.chunks) or send.chunks[request.chunk].nbytes != request.nbytes:
            raise ProtocolViolation(
                f"a request for {request.nbytes} bytes of chunk {request.chunk}, which was not offered"
            )
        return send.prepared.pop(request.chunk, None) or self._memory_of(send.chunks[request.chunk])

    def _memory_of(self, chunk: ReadDescriptors) -> AbstractContextManager[Vector]:
        blocks = np.frombuffer(chunk.blocks, BLOCK_NUMBER)
        return self._memory.reading(chunk.sources, blocks, chunk.offset, chunk.size)

    # ---- messages to the receiver ------------------------------------------------------------------------------------

    def _say(self, send: RankSend, write: Callable[[Post], None]) -> None:
        # The thread that has a message writes it: one that took it from a queue would have to wake up first.
        if self._post is None:
            with self._posting:
                if self._post is None:
                    return self._waiting.append((send, write))
        try:
            if send.number in self._sends:  # otherwise it ended in the meantime
                write(self._post)
        except OSError as error:
            self._break(error)
        return None

    # ---- answers of the receiver -------------------------------------------------------------------------------------

    def _take_answers(self, answers: ReceiverAnswers, sock: socket.socket) -> None:
        timeout = self._rank.settings.timeout
        try:
            with sock:
                # Reading wakes up at intervals to check how long an answer has been pending.
                wait_in_calls(sock, timeout, timeout / 4)
                answers.read_from(sock, self._require_progress)
                while True:
                    self._answered(answers.next())
        except Exception as error:
            self._break(error)

    def _require_progress(self) -> None:
        """Raise if an answer has been pending for too long without progress; otherwise silence is allowed."""
        # Only owed answers count, and only while nothing moves: a slow receiver is not a lost one.
        overdue = time.monotonic() - self._rank.settings.timeout
        with self._changed:
            owed = [send.finished_at for send in self._sends.values() if send.finished_at is not None]
        if owed and max(min(owed), self._moved_at) < overdue:
            raise TransferFailed(
                f"the receiver did not acknowledge the send within {self._rank.settings.timeout:.0f} s"
            )

    def _answered(self, message: FromReceiver) -> None:
        if not isinstance(message, Acknowledged | Refused):
            raise ProtocolViolation(f"a receiver must not send {type(message).__name__} here")
        with self._changed:
            self._moved_at = time.monotonic()
            send = self._sends.get(message.send)
        if send is None:
            return None  # cancelled in the meantime
        if isinstance(message, Refused):
            return self._end(send, TransferFailed(f"the receiver refused: {message.reason}"))
        if send.finished_at is None:
            raise ProtocolViolation("an acknowledgement of an incomplete send")
        total = sum(chunk.nbytes for chunk in send.chunks)
        return self._end(send, SendReport(total, len(send.chunks), self.transport or ""))

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _end(self, send: RankSend, outcome: SendReport | TercetError) -> None:
        with self._changed:
            # It has ended already: several causes may end a send at once, and only the first one is reported.
            if self._sends.pop(send.number, None) is None:
                return
            # Blocks are unpinned after this; a receiver that reads them later does not accept them.
            if not is_core_word(send.number):
                self._rank.region.clear_word(send.number)
            send.outcome = outcome
        self._report(send)

    def _report(self, send: RankSend) -> None:
        """Call ``on_done`` once, if the send has ended and no thread writes its blocks."""
        with self._changed:
            outcome = send.outcome
            if outcome is None or send.readers or send.reported:
                return
            send.reported = True
        done = isinstance(outcome, SendReport)
        self._rank.counters.count(sends_done=done, sends_failed=not done)
        try:
            send.on_done(outcome)
        except Exception:
            # The caller's mistake must not end the connection for other sends.
            logger.exception("on_done of a send to %s failed", self.addresses[0])

    def _break(self, error: Exception) -> None:
        if not isinstance(error, OSError | TercetError):
            logger.error("the connection to %s failed", self.addresses[0], exc_info=error)
        self._die(TransferFailed(f"the connection to the receiver broke: {_words(error)}"))

    def _die(self, error: TercetError) -> None:
        with self._changed:
            if self._dead is not None:
                return
            # First: from here on no thread and no send begins.
            self._dead = error
            orphans = list(self._sends.values())
            for sock in self._sockets:
                shut(sock)
        logger.info("the session with %s has ended: %s", self.addresses[0], error.message)
        self._rank.counters.count(sessions_lost=1)
        self._on_dead(self)
        with self._posting:
            if self._post is not None:
                self._post.close()
        # Outside of the lock, since on_done is the caller's code.
        for send in orphans:
            self._end(send, error)


def _words(error: BaseException) -> str:
    if isinstance(error, TercetError):
        return error.message
    if isinstance(error, TimeoutError):
        return "it neither answers nor reads"
    return str(error) or type(error).__name__


M = TypeVar("M", bound=FromReceiver)


class ReceiverAnswers:
    """A receiver's messages. Those before :meth:`read_from` must be complete within ``seconds`` in total.

    Use :meth:`expect` before that call, and :meth:`next` after it.
    """

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._sock = sock
        self._deadline: float | None = time.monotonic() + seconds
        self._on_silence = self._give_up
        self._splitter = MessageSplitter(FROM_RECEIVER)
        self._messages = self._receive()

    def read_from(self, sock: socket.socket, on_silence: Callable[[], None]) -> None:
        """Read from ``sock`` from now on.

        ``on_silence`` is called at each timeout of it, and may raise to end the wait.
        """
        self._sock, self._on_silence, self._deadline = sock, on_silence, None

    def next(self) -> FromReceiver:
        """Return the next message.

        Raises ``OSError`` when the connection ends, and :class:`ProtocolViolation` for a refusal.
        """
        message = next(self._messages)
        if isinstance(message, Refused) and message.send == 0:
            raise ProtocolViolation(message.reason)
        return message

    def expect(self, kind: type[M]) -> M:
        """Return the next message, which is a ``kind``; raise :class:`~tercet.protocol.TransferFailed` if late."""
        message = self.next()
        if not isinstance(message, kind):
            raise ProtocolViolation(f"a receiver must send {kind.__name__} here, not {type(message).__name__}")
        return message

    def _give_up(self) -> None:
        raise TransferFailed("the receiver did not answer the greeting in time")

    def _receive(self) -> Iterator[FromReceiver]:
        while True:
            if self._deadline is not None:
                left = self._deadline - time.monotonic()
                if left <= 0:
                    self._give_up()
                self._sock.settimeout(left)
            try:
                data = self._sock.recv(64 * 1024)
            except (TimeoutError, BlockingIOError):
                self._on_silence()
                continue
            if not data:
                raise ConnectionResetError("the receiver closed the connection")
            yield from self._splitter.feed(data)
