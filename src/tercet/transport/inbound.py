"""One sender's session: a state machine without I/O for its messages, and the loop that carries out its actions.

:meth:`Inbound.take` and :meth:`Inbound.settle` return actions: chunks to read, and answers. :class:`SenderSession`
carries them out at the allowed rate, under the lease's fence, and reports the results of reads. Read descriptors that
arrive together are read together, which is faster with libraries.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TypeVar

import msgspec

from tercet.protocol import TercetError, TransferFailed
from tercet.transport.backends.reading import Batch, Copies, UnderLease, copies_of, staging_copies
from tercet.transport.backends.tcp import TcpReader
from tercet.transport.grants import GrantTable
from tercet.transport.local_rank import Agreement, LocalRank
from tercet.transport.peer_messages import (
    Acknowledged,
    FromSender,
    Greeting,
    ProtocolViolation,
    ReadDescriptors,
    Refused,
    SendBegin,
    SendEnd,
)
from tercet.transport.region import BlockShape, copy_tokens, rearranged

logger = logging.getLogger(__name__)
S = TypeVar("S", ReadDescriptors, SendEnd)

OnFilled = Callable[[str, int], None]

REMEMBERED_REFUSED = 1024
MAX_BATCH_ROWS = 65536
# Maximum bytes that may wait for conversion; one chunk may be larger.
MAX_STAGED_BYTES = 8 * 1024 * 1024
MAX_STAGED_CHUNK_BYTES = 256 * 1024 * 1024
TURN_BYTES = 1024 * 1024
# Maximum time, in seconds, for which a receiver with a limit may catch up after it was idle or slept too long.
BURST_SECONDS = 0.005


@dataclass(frozen=True)
class Filled:
    """Action: all of a send is in place, the lease's KV valid up to ``valid_end``.

    Tell the engine, then acknowledge.
    """

    send: int
    lease: str
    valid_end: int


Action = Batch | Filled | Refused


class Inbound:
    """One sender's session, with the transport and layout that were agreed on."""

    def __init__(self, rank: LocalRank, grants: GrantTable, agreed: Agreement) -> None:
        self._rank, self._grants = rank, grants
        self._session, self._shape, self._block = agreed.session, agreed.shape, agreed.block
        self._order = rearranged(agreed.shape.order, rank.region.shape.order)
        self._batch: Batch | None = None
        self._staging = memoryview(b"")
        # The latest sends that were refused: their other messages are under way, and the sender gets one refusal.
        self._refused: dict[int, None] = {}

    def take(self, message: FromSender) -> list[Action]:
        """Return the actions for a message; raise :class:`ProtocolViolation` if the connection must be closed."""
        if isinstance(message, Greeting):
            raise ProtocolViolation("a session must begin only once")
        if isinstance(message, SendBegin):
            return self._begun(message)
        return self._ended(message) if isinstance(message, SendEnd) else self._descriptors(message)

    def settle(self) -> list[Action]:
        """Return the read of all waiting chunks. Call this when no more messages are available now."""
        batch, self._batch = self._batch, None
        return [] if batch is None else [batch]

    def read_next(self, messages: Sequence[FromSender]) -> Sequence[ReadDescriptors]:
        """Return the first chunks of messages that were not taken yet, if a next batch is likely to have them.

        They are of one send, as a batch is. There are none with blocks of another size, of which a batch may have one
        chunk only, or if chunks pass through buffers, which must be free before.
        """
        chunks = [each for each in messages if isinstance(each, ReadDescriptors)]
        send = self._batch.send if self._batch else chunks[0].send if chunks else None
        if self._block is not None or self._rank.staged is not None or send in self._refused:
            return ()
        return list(takewhile(lambda chunk: chunk.send == send, chunks))

    def was_read(self, batch: Batch, *, alive: bool) -> list[Action]:
        """Return the actions after a batch was read; ``alive``: its blocks were pinned all the time."""
        actions: list[Action] = []
        for chunk in batch.chunks:
            # Refused while it was read, for another chunk of the same batch.
            if chunk.send in self._refused:
                self._rank.counters.count(chunks_refused=1)
                continue
            try:
                if not alive:
                    # Late: its blocks may have been reused while they were copied. The send's KV stays invalid.
                    raise TransferFailed("the sender has cancelled this chunk")
                valid_end = self._grants.arrived((self._session, chunk.send), chunk)
            except TercetError as error:
                actions += self._refuse(chunk, error)
                continue
            self._rank.counters.count(chunks_received=1, bytes_received=chunk.nbytes)
            actions += self._filled(chunk, valid_end)
        return actions

    def was_not_read(self, batch: Batch, error: TercetError) -> list[Action]:
        """Return the actions after a batch that could not be read because of ``error``."""
        return [action for chunk in batch.chunks for action in self._refuse(chunk, error)]

    def close(self) -> list[tuple[str, int]]:
        """End the session, and with it its incomplete sends.

        Return each one's lease and the end of its valid KV: the part that arrived in every layer.
        """
        return self._grants.forget_sender(self._session)

    def _begun(self, begun: SendBegin) -> list[Action]:
        # Its sender has not read the refusal yet.
        if begun.send in self._refused:
            return []
        try:
            self._grants.begin((self._session, begun.send), begun)
        except TercetError as error:
            self._rank.counters.count(receives_refused=1)
            return self.refuse_send(begun.send, error.message)
        return []

    def _descriptors(self, chunk: ReadDescriptors) -> list[Action]:
        if chunk.send in self._refused:
            self._rank.counters.count(chunks_refused=1)
            return []
        chunk = self._with_unit(chunk)
        settled: list[Action] = []
        try:
            # What waits is read first: a batch is of one send, since its reader asks for one send's word.
            if not self._fits(chunk):
                settled = self.settle()
            batch = self._batch or self._new_batch(chunk)
            in_place = self._grants.in_place((self._session, chunk.send), chunk.lease)
            batch.copies.append(self._copies(chunk, batch, in_place))
        except TercetError as error:
            return settled + self._refuse(chunk, error)
        batch.chunks.append(chunk)
        batch.in_place.append(in_place)
        self._batch = batch
        return settled

    def _fits(self, chunk: ReadDescriptors) -> bool:
        """True if a chunk can be read together with the waiting ones."""
        batch = self._batch
        if batch is None:
            return True
        if (batch.send, batch.lease) != (chunk.send, chunk.lease):
            return False
        if batch.staged:
            return sum(each.nbytes for each in batch.chunks) + chunk.nbytes <= len(batch.target)
        return sum(map(len, batch.copies)) < MAX_BATCH_ROWS

    def _new_batch(self, chunk: ReadDescriptors) -> Batch:
        if self._rank.staged is not None:
            return Batch(chunk.send, chunk.lease, memoryview(b""), memory=self._rank.staged, order=self._order)
        if self._block is None:
            return Batch(chunk.send, chunk.lease, self._rank.region.bytes)
        self._grants.locate_tokens(chunk)
        needed = (chunk.end - chunk.begin) * chunk.layers * self._part_bytes(chunk, self._block)
        if needed > MAX_STAGED_CHUNK_BYTES:
            raise TransferFailed(
                f"a chunk of {needed} bytes is too large to convert; at most {MAX_STAGED_CHUNK_BYTES} are allowed"
            )
        # Kept for the session: most chunks of a sender have the same size.
        if len(self._staging) < needed:
            self._staging = memoryview(bytearray(max(needed, MAX_STAGED_BYTES)))
        return Batch(chunk.send, chunk.lease, self._staging, staged=True)

    def _copies(self, chunk: ReadDescriptors, batch: Batch, in_place: int) -> Copies:
        if self._block is not None:
            self._grants.locate_tokens(chunk)
            at = sum(each.nbytes for each in batch.chunks)
            return staging_copies(chunk, self._part_bytes(chunk, self._block), self._shape, at)
        blocks = self._grants.locate(chunk, in_place)
        size, rest = divmod(self._rank.region.shape.block_bytes, chunk.parts)
        if rest:
            raise TransferFailed(f"blocks cannot be cut into {chunk.parts} equal parts")
        if batch.memory is not None:
            if chunk.nbytes > batch.memory.buffer_bytes:
                raise TransferFailed(f"a chunk of {chunk.nbytes} bytes does not fit into this rank's buffers")
            if self._order is not None and chunk.parts != 1:
                raise TransferFailed("blocks with another order of items must be sent whole")
            found = staging_copies(chunk, size, self._shape, 0)
            batch.blocks.append(blocks)
            return found
        return copies_of(chunk, size, self._shape, self._rank.region.shape, blocks)

    def _part_bytes(self, chunk: ReadDescriptors, block: BlockShape) -> int:
        """Return the bytes that a chunk has of each of the sender's blocks: whole heads."""
        ours = self._rank.block.heads if self._rank.block else 0
        heads, rest = divmod(ours, chunk.parts or 1)
        if rest or not heads:
            raise TransferFailed(f"blocks cannot be cut into {chunk.parts} equal parts")
        return heads * block.block_bytes // block.heads

    def _with_unit(self, message: S) -> S:
        """Return the message with the size of the sender's slots, which only this side knows."""
        return msgspec.structs.replace(message, unit=0 if self._block is None else self._block.tokens)

    def _ended(self, end: SendEnd) -> list[Action]:
        if end.send in self._refused:
            return []
        end = self._with_unit(end)
        try:
            return self._filled(end, self._grants.ended((self._session, end.send), end))
        except TercetError as error:
            return self._refuse(end, error)

    def _filled(self, message: ReadDescriptors | SendEnd, valid_end: int | None) -> list[Action]:
        return [] if valid_end is None else [Filled(message.send, message.lease, valid_end)]

    def _refuse(self, message: ReadDescriptors | SendEnd, error: TercetError) -> list[Action]:
        is_end = isinstance(message, SendEnd)
        self._rank.counters.count(chunks_refused=not is_end, receives_refused=is_end)
        self._grants.forget(message.lease, (self._session, message.send), error)
        return self.refuse_send(message.send, error.message)

    def refuse_send(self, send: int, reason: str) -> list[Action]:
        """Accept no more messages of a send; the sender is notified once."""
        if send in self._refused:
            return []
        self._refused[send] = None
        if len(self._refused) > REMEMBERED_REFUSED:
            del self._refused[next(iter(self._refused))]
        return [Refused(send, reason)]


class Turn:
    """One thread's turn on a core that it shares.

    vLLM's processes wait for one another by yielding their core and polling. A thread that copies without a pause would
    keep the core until the kernel preempts it, several milliseconds per poll; so it yields, too.
    """

    def __init__(self) -> None:
        self._copied = 0

    def took(self, nbytes: int) -> None:
        """Count copied bytes; after :data:`TURN_BYTES`, let other threads run."""
        self._copied += nbytes
        if self._copied >= TURN_BYTES:
            self._copied = 0
            os.sched_yield()


class Pace:
    """Common limit of a rank's receiving threads: ``limit`` bytes per second, 0 for no limit.

    If cores share the path to memory, receiving slows down computing on any core. Thread-safe.
    """

    def __init__(self, limit: float = 0.0) -> None:
        self._limit = limit
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._over = threading.Event()

    def took(self, nbytes: int) -> None:
        """Count received bytes; return once more may be received. Do not call this while a lease is held."""
        if not self._limit:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - BURST_SECONDS) + nbytes / self._limit
            wait = self._free_at - now
        if wait > 0:
            self._over.wait(wait)

    def close(self) -> None:
        """Release all waiting threads."""
        self._over.set()


class SenderSession:
    """One sender's session: it carries out the actions of its messages in order, and answers with ``say``."""

    def __init__(
        self, rank: LocalRank, grants: GrantTable, agreed: Agreement, pace: Pace, on_filled: OnFilled,
        say: Callable[[msgspec.Struct], None],
    ) -> None:  # fmt: skip
        self._rank, self._grants, self._agreed = rank, grants, agreed
        self._pace, self._on_filled, self._say = pace, on_filled, say
        self._inbound = Inbound(rank, grants, agreed)
        self._turn = Turn()

    def take(self, messages: Sequence[FromSender]) -> None:
        """Carry out the actions of messages; raise :class:`ProtocolViolation`."""
        reader = self._agreed.reader
        if isinstance(reader, TcpReader):
            reader.ask_early(self._inbound.read_next(messages))
        for message in messages:
            if isinstance(message, SendEnd):
                self.settle()  # all its chunks have arrived: read them now
            self._act(self._inbound.take(message))

    def settle(self) -> None:
        """Carry out the actions that were postponed because more messages could arrive."""
        self._act(self._inbound.settle())
        if isinstance(self._agreed.reader, TcpReader):
            self._agreed.reader.discard()  # of a send that was refused

    def _act(self, actions: list[Action]) -> None:
        todo = deque(actions)
        while todo:
            match todo.popleft():
                case Batch() as batch:
                    todo.extend(self._read(batch))
                case Filled() as filled:
                    # An acknowledgement lets the sender unpin its blocks, so the engine must have the KV before it.
                    if self._report(filled.lease, filled.valid_end):
                        self._rank.counters.count(receives_done=1)
                        self._say(Acknowledged(filled.send))
                    else:
                        self._rank.counters.count(receives_refused=1)
                        reason = "the receiver could not accept the KV that arrived"
                        todo.extend(self._inbound.refuse_send(filled.send, reason))
                case Refused() as refused:
                    self._say(refused)

    def _read(self, batch: Batch) -> list[Action]:
        under_lease: UnderLease = (lambda step: step()) if batch.staged else self._under_lease(batch)
        try:
            alive = self._agreed.reader.read(batch, under_lease)
            if batch.staged and alive:
                self._convert(batch)
        except ProtocolViolation:
            raise
        except TercetError as error:
            return self._inbound.was_not_read(batch, error)
        except OSError as error:
            if isinstance(self._agreed.reader, TcpReader):
                raise  # the next bytes on the connection are unknown
            return self._inbound.was_not_read(batch, TransferFailed(f"the sender's memory cannot be read: {error}"))
        found = self._inbound.was_read(batch, alive=alive)
        # Now and then, not for each chunk: the report keeps the lease alive.
        valid_end = self._grants.progress(batch.lease, time.monotonic())
        if valid_end is not None:
            self._report(batch.lease, valid_end)
        return found

    def _report(self, lease: str, valid_end: int) -> bool:
        """Report the end of a lease's valid KV; return True if the engine accepted it."""
        try:
            self._on_filled(lease, valid_end)
        except Exception:
            logger.exception("on_filled of lease %s failed", lease)
            return False
        return True

    def _under_lease(self, batch: Batch) -> UnderLease:
        begun = False

        def begin(step: Callable[[], int]) -> int:
            nonlocal begun
            # Several threads may do this; each does it before it writes.
            for chunk, in_place in zip(batch.chunks, batch.in_place, strict=True):
                self._grants.overwriting(chunk, in_place)
            begun = True
            return step()

        def run(step: Callable[[], int]) -> int:
            moved = self._grants.write(batch.lease, step if begun else partial(begin, step))
            self._turn.took(moved)
            self._pace.took(moved)
            return moved

        return run

    def _convert(self, batch: Batch) -> None:
        """Copy the tokens of staged blocks into our blocks of another size."""
        ours, theirs, region = self._rank.block, self._agreed.block, self._rank.region
        if ours is None or theirs is None:
            raise TransferFailed("blocks of another size were not agreed on")
        at = 0
        for chunk in batch.chunks:
            heads, part = ours.heads // chunk.parts, region.shape.block_bytes // chunk.parts
            slots = chunk.end - chunk.begin
            in_place = self._grants.in_place((self._agreed.session, chunk.send), chunk.lease)
            copies = self._grants.locate_tokens(chunk, in_place)
            self._grants.overwriting(chunk, in_place)
            for layer in range(chunk.layer, chunk.layer + chunk.layers):
                for copy in copies:
                    source = batch.target[at + (copy.slot - chunk.begin) * chunk.size :][: chunk.size]
                    target = region.blocks(layer, copy.block)[chunk.part * part :][:part]
                    self._grants.write(chunk.lease, partial(copy_tokens, source, theirs, target, ours, heads, copy))
                at += slots * chunk.size
            self._pace.took(chunk.nbytes)

    def close(self) -> None:
        """Release the session's resources."""
        # Before the reader: what has arrived in every layer is valid, whatever ended the session.
        lost = self._inbound.close()
        self._rank.counters.count(receives_dropped=len(lost))
        self._agreed.reader.close()
        for lease, valid_end in lost:
            self._report(lease, valid_end)
