"""Write permissions: the receiver's side of leases, as a state machine without I/O.

The central invariant: after :meth:`GrantTable.revoke` has returned, no byte is written under that lease. A writing
thread is inside :meth:`GrantTable.write`, never waits for a peer there for more than a few milliseconds, and the
revocation waits for it. This is the transport's only record of leases: what is granted (:class:`Grant`), the arrived
parts of each send (:class:`OpenLease`), and how far the KV is valid (:class:`Validity`).

A lease into which a send has brought three blocks of layer 0 and one of layer 1, whose attention looks back over a
window and so needs no block at slot 0::

                 begin                                end
    tokens     ──┼────────┬────────┬────────┬────────┤
    slot             0        1        2        3
    layer 0, group 0 17 ███   4  ███   9  ███   23       a number is a block, a bar is KV that has arrived
    layer 1, group 1 NOWHERE  5  ███   8        2
    valid      ────────────────────▶ valid.end           the prefix that is whole in every layer

A lease is for certain tokens, and a send begins with the content of its KV (:meth:`OpenLease.begin`): other content is
refused before a byte of it is written. Its end and its chunks may arrive in any order. It is complete once every block
of every layer of its range is in place, and refused if all chunks have arrived and a block is missing. Blocks that
arrived in every layer are valid even if their send never ends. KV that is valid from the lease's beginning on, in whole
blocks, may be in use as prefix cache, and is not written again (:meth:`OpenLease.in_place`).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from tercet.protocol import BadRequest, Conflict, Content, LeaseEnded, TercetError, TransferFailed, content_of
from tercet.protocol.content import TOKEN_BYTES
from tercet.transport.backends.reading import NOWHERE
from tercet.transport.peer_messages import ReadDescriptors, SendBegin, SendEnd
from tercet.transport.region import Numbers, TokenCopy, first_token, planes_of_groups, token_copies


class Grant(msgspec.Struct, frozen=True):
    """Permission for a peer to write certain blocks under ``lease``."""

    lease: str
    # The blocks of each group of layers: in one group, block i, at slot i, holds the tokens from begin + i * block_size
    # on. NOWHERE is a slot at which the group's layers do not look back: no KV is written or required there.
    blocks: Sequence[Sequence[int]]
    begin: int  # a multiple of block_size
    end: int  # the slots reach to it
    block_size: int
    tokens: bytes  # the first ``end`` tokens of the lease's sequence, in the form of :func:`~tercet.protocol.packed`
    salt: str | None  # their cache salt

    def require_whole(self, groups: int) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` unless tokens, and blocks of ``groups`` groups, reach ``end``."""
        needed = -(-(self.end - self.begin) // self.block_size)
        if {len(blocks) for blocks in self.blocks} != {needed} or self.begin % self.block_size:
            counts = ", ".join(str(len(blocks)) for blocks in self.blocks)
            raise BadRequest(f"blocks: {counts} do not hold [{self.begin}, {self.end})", "blocks")
        if len(self.blocks) != groups:
            raise BadRequest(f"blocks: has {len(self.blocks)} groups, but this rank has {groups} groups", "blocks")
        if len(self.tokens) != self.end * TOKEN_BYTES:
            raise BadRequest(
                f"tokens: has {len(self.tokens)} bytes; {self.end} tokens need {self.end * TOKEN_BYTES}", "tokens"
            )

    def continues(self, old: Grant) -> bool:
        """True if this is ``old`` with more tokens of the same sequence, and more blocks after its blocks.

        A block of ``old`` may be closed here (:data:`NOWHERE`): superseded state blocks are not needed any more.
        """
        return (
            (self.begin, self.block_size, self.salt or None) == (old.begin, old.block_size, old.salt or None)
            and all(
                len(new) >= len(had) and all(one in (other, NOWHERE) for one, other in zip(new, had, strict=False))
                for new, had in zip(self.blocks, old.blocks, strict=True)
            )
            and self.tokens.startswith(old.tokens)
        )

    def num_slots(self, unit: int) -> int:
        """Return the number of a sender's slots that the blocks touch; a slot has ``unit`` tokens, 0: as the blocks."""
        unit = unit or self.block_size
        end = self.begin + len(self.blocks[0]) * self.block_size
        return -(-(end - first_token(self.begin, unit)) // unit)


class ReceiveEnd(msgspec.Struct, frozen=True):
    """The end of a receive of ``bytes`` of KV under ``lease``, for the trace of its sender."""

    lease: str
    traceparent: str  # the sender's place in the trace
    began_ns: int  # Unix times in nanoseconds
    ended_ns: int
    bytes: int
    code: str = ""  # of its error, or empty
    reason: str = ""


OnReceiveEnd = Callable[[ReceiveEnd], None]


# Disjoint token ranges, sorted, not touching.
Ranges = list[tuple[int, int]]


class Validity:
    """The valid ranges of a lease's KV in each of ``num_planes`` planes; ``end`` is the end of those from ``begin``.

    Senders that split heads differently cut blocks into different numbers of parts; parts of different numbers are not
    combined.
    """

    def __init__(self, begin: int, num_planes: int) -> None:
        self.end = begin
        self._begin = begin
        self._num_planes = num_planes
        # Keys: number of parts, part, plane.
        self._of: dict[int, dict[int, dict[int, Ranges]]] = {}

    def add(self, part: int, parts: int, planes: Iterable[int], pieces: Ranges) -> None:
        """Add token ranges that are valid in one part of the blocks of some planes."""
        valid = self._of.setdefault(parts, {}).setdefault(part, {})
        for plane in planes:
            for piece in pieces:
                valid[plane] = _merged(valid.get(plane, []), piece)
        self._settle()

    def remove(self, part: int, parts: int, planes: range, gone: tuple[int, int]) -> None:
        """Remove a token range that is overwritten in one part of some planes' blocks, in all its parts."""
        changed = False
        for other, by_part in self._of.items():
            for number, valid in by_part.items():
                # As fractions of a block: the parts may be cut differently.
                if number * parts < (part + 1) * other and part * other < (number + 1) * parts:
                    for plane in planes:
                        ranges = valid.get(plane)
                        if ranges and gone[0] < ranges[-1][1]:
                            valid[plane] = _without(ranges, gone)
                            changed = True
        if changed:
            self._settle()

    def _settle(self) -> None:
        self.end = self._begin
        for parts, by_part in self._of.items():
            # A prefix counts only if every part of the blocks has it in every plane.
            if len(by_part) < parts or any(len(valid) < self._num_planes for valid in by_part.values()):
                continue
            every = [ranges for valid in by_part.values() for ranges in valid.values()]
            if all(ranges and ranges[0][0] == self._begin for ranges in every):
                self.end = max(self.end, min(ranges[0][1] for ranges in every))


def _merged(ranges: Ranges, new: tuple[int, int]) -> Ranges:
    """Return disjoint sorted ranges with a new one added; ranges that touch are joined."""
    begin, end = new
    kept: Ranges = []
    for low, high in ranges:
        if high < begin or end < low:
            kept.append((low, high))
        else:
            begin, end = min(begin, low), max(end, high)
    return sorted([*kept, (begin, end)])


def _without(ranges: Ranges, gone: tuple[int, int]) -> Ranges:
    """Return disjoint sorted ranges with one range removed."""
    begin, end = gone
    pieces = [piece for low, high in ranges for piece in ((low, min(high, begin)), (max(low, end), high))]
    return [(low, high) for low, high in pieces if low < high]


MAX_PARTS = 1024
MAX_SENDS = 64  # under one lease at a time
_NOTHING = np.zeros((0, 0), dtype=np.bool_)
_GAP = np.zeros(1, dtype=np.bool_)

# The sender's session, and its number for the send.
SendKey = tuple[str, int]


@dataclass
class Receive:
    """One send of the first ``limit`` tokens under a lease."""

    limit: int
    planes: NDArray[np.int64]  # those that it fills
    arrived: NDArray[np.bool_]  # by layer and slot, True also where nothing is needed
    kind: tuple[int, int, int] | None = None  # part, parts and unit, after the first chunk
    chunks: int = 0
    ended: SendEnd | None = None  # its end message, which may arrive before the last chunk
    traceparent: str = ""  # the sender's place in a sampled trace
    began_ns: int = field(default_factory=time.time_ns)
    nbytes: int = 0


class OpenLease:
    """One open lease of a rank whose groups of layers are ``groups``; ``on_receive_end`` is that of its table.

    Not thread-safe: the table's lock is held in every call except :meth:`locate` and :meth:`locate_tokens`, which read
    only the grant. ``writers`` counts the threads that may write its blocks now. Methods are those of the table, and
    raise :class:`~tercet.protocol.BadRequest` for messages that do not fit the lease or the send.
    """

    def __init__(self, grant: Grant, groups: Sequence[range], on_receive_end: OnReceiveEnd) -> None:
        self.grant = grant
        self.num_layers = sum(map(len, groups))
        self.valid = Validity(grant.begin, self.num_layers)
        self.sends: dict[SendKey, Receive] = {}
        self.writers = 0
        self.reported_at = time.monotonic()
        self._numbers: Numbers = np.array(grant.blocks, dtype=np.int64)  # by group and slot
        self._groups = groups
        self._on_receive_end = on_receive_end

    def extend(self, grant: Grant) -> None:
        """Replace the grant by one with more tokens and blocks; the lease is unchanged if it does not continue."""
        if not grant.continues(self.grant):
            raise BadRequest(f"lease {grant.lease} cannot be extended: the extension has other tokens or blocks")
        self.grant, self._numbers = grant, np.array(grant.blocks, dtype=np.int64)

    def begin(self, send: SendKey, begun: SendBegin) -> None:
        grant, limit = self.grant, begun.content.end
        if not grant.begin < limit <= grant.end:
            raise BadRequest(f"KV up to token {limit} is outside the lease's [{grant.begin}, {grant.end})")
        if send in self.sends:
            raise BadRequest("a send must begin only once")
        if len(self.sends) >= MAX_SENDS:
            raise BadRequest(f"lease: has {len(self.sends)} sends already; at most {MAX_SENDS} may run at once")
        # The last check, since it hashes the tokens: a send that does not fit costs no more than a comparison.
        if content_of(grant.tokens, grant.salt, limit) != begun.content:
            raise Conflict(
                f"the KV is of other tokens, or under another cache salt, than those of lease {grant.lease}: "
                "send the prompt of the prep_recv call",
                "kv_addr_info",
            )
        self.sends[send] = Receive(limit, self._planes_of(begun), _NOTHING, traceparent=begun.traceparent)

    def in_place(self, send: SendKey) -> int:
        if send not in self.sends:
            raise _not_begun()
        return self._blocks_in_place()

    def locate(self, chunk: ReadDescriptors, in_place: int) -> Numbers:
        self._require_inside(chunk)
        group = next(at for at, planes in enumerate(self._groups) if chunk.layer in planes)
        found = self._numbers[group, chunk.begin : chunk.end]
        if chunk.layer + chunk.layers > self._groups[group].stop or (found < 0).any():
            raise BadRequest(
                f"slots [{chunk.begin}, {chunk.end}) have no blocks for layer {chunk.layer} and the next ones"
            )
        if in_place > chunk.begin:
            found = found.copy()
            found[: in_place - chunk.begin] = NOWHERE
        return found

    def locate_tokens(self, chunk: ReadDescriptors, in_place: int) -> list[TokenCopy]:
        self._require_inside(chunk)
        grant, slots = self.grant, range(chunk.begin, chunk.end)
        (blocks,) = grant.blocks
        found = token_copies(slots, chunk.unit, grant.begin, blocks, grant.block_size)
        return [copy for copy in found if copy.block not in blocks[:in_place]] if in_place else found

    def overwriting(self, chunk: ReadDescriptors, in_place: int) -> None:
        grant = self.grant
        unit = chunk.unit or grant.block_size
        origin = first_token(grant.begin, unit)
        left_out = grant.begin + in_place * grant.block_size
        kept = grant.begin + self._blocks_in_place() * grant.block_size
        gone = (max(origin + chunk.begin * unit, left_out), origin + chunk.end * unit)
        if gone[0] >= gone[1]:
            return
        # Blocks that are in place may be prefix cache by now, which running sequences read.
        if gone[0] < kept:
            raise TransferFailed(f"KV up to token {kept} has arrived from another sender, and is not overwritten")
        planes = range(chunk.layer, chunk.layer + chunk.layers)
        self.valid.remove(chunk.part, chunk.parts, planes, gone)

    def arrived(self, send: SendKey, chunk: ReadDescriptors) -> int | None:
        receive = self._receive_of(send, chunk)
        if not {*range(chunk.layer, chunk.layer + chunk.layers)} <= {*receive.planes.tolist()}:
            raise BadRequest("a send must fill only the planes of its begin message")
        receive.chunks += 1
        receive.nbytes += chunk.nbytes
        # A chunk that comes twice changes nothing here, and still counts: then one is missing at the end.
        receive.arrived[chunk.layer : chunk.layer + chunk.layers, chunk.begin : chunk.end] = True
        return self._settle(send, receive)

    def ended(self, send: SendKey, end: SendEnd) -> int | None:
        grant = self.grant
        if not grant.begin <= end.begin < end.end <= grant.end:
            raise BadRequest(f"[{end.begin}, {end.end}) is outside the lease's [{grant.begin}, {grant.end})")
        receive = self._receive_of(send, end)
        if end.end > receive.limit:
            raise BadRequest(f"a send of the first {receive.limit} tokens cannot end at token {end.end}")
        if receive.ended is not None:
            raise BadRequest("a send must end only once")
        receive.ended = end
        return self._settle(send, receive)

    def keep(self) -> int:
        """Mark the part of each send that has arrived in every layer as valid; return the valid end."""
        for receive in self.sends.values():
            self._keep(receive)
        return self.valid.end

    def forget(self, send: SendKey, error: TercetError) -> bool:
        """Forget a send that an error ended; the part of it that arrived in every layer is valid.

        Return True if any chunk of it had arrived.
        """
        receive = self.sends.pop(send, None)
        if receive is None:
            return False
        has_part = self._keep(receive)
        self._report_end(receive, error)
        return has_part

    def _require_inside(self, chunk: ReadDescriptors) -> None:
        num_slots = self.grant.num_slots(chunk.unit)
        inside = (
            0 <= chunk.layer < chunk.layer + chunk.layers <= self.num_layers
            and 0 <= chunk.begin < chunk.end <= num_slots
        )
        if not (inside and 0 <= chunk.part < chunk.parts <= MAX_PARTS):
            raise BadRequest(
                f"part {chunk.part} of {chunk.parts} of slots [{chunk.begin}, {chunk.end}) of layers [{chunk.layer}, "
                f"{chunk.layer + chunk.layers}) is outside the lease's {num_slots} slots and {self.num_layers} layers"
            )

    def _blocks_in_place(self) -> int:
        return (self.valid.end - self.grant.begin) // self.grant.block_size

    def _receive_of(self, send: SendKey, message: ReadDescriptors | SendEnd) -> Receive:
        receive, kind = self.sends.get(send), (message.part, message.parts, message.unit)
        if receive is None:
            raise _not_begun()
        if receive.kind not in (None, kind) or not 0 <= message.part < message.parts <= MAX_PARTS:
            raise BadRequest("a send must always fill the same part of the blocks")
        slots = self.grant.num_slots(message.unit)
        if slots > receive.arrived.shape[1]:  # the first chunk of the send, or the lease was extended
            # True: not needed. All planes that the send does not fill, and slots without a block here; blocks of
            # another size are all needed.
            arrived = np.ones((self.num_layers, slots), dtype=np.bool_)
            arrived[receive.planes] = False
            if not message.unit:
                for planes, numbers in zip(self._groups, self._numbers, strict=True):
                    arrived[planes.start : planes.stop] |= numbers < 0
            if receive.kind is not None:
                arrived[:, : receive.arrived.shape[1]] |= receive.arrived
            receive.arrived = arrived
        receive.kind = kind
        return receive

    def _planes_of(self, begun: SendBegin) -> NDArray[np.int64]:
        """Return the planes that a send declares to fill: all, or some ranges."""
        if any(not 0 <= first < stop <= self.num_layers for first, stop in begun.planes):
            raise BadRequest(f"a send fills planes {begun.planes!r:.80}, but this rank has {self.num_layers} planes")
        if not begun.planes:
            return np.arange(self.num_layers)
        return np.unique(np.concatenate([range(*each) for each in begun.planes]))

    def _settle(self, send: SendKey, receive: Receive) -> int | None:
        # Chunks and end message come over several connections, in any order.
        if receive.ended is None or receive.chunks < receive.ended.chunks:
            return None
        del self.sends[send]
        grant, end = self.grant, receive.ended.end
        part, parts, unit = receive.ended.part, receive.ended.parts, receive.ended.unit or grant.block_size
        begin, origin = first_token(receive.ended.begin, unit), first_token(grant.begin, unit)
        first = (begin - origin) // unit
        covered = receive.arrived[:, first : -(-(end - origin) // unit)]
        if not covered.all():
            layers = covered.sum(axis=0)
            at = int((layers < self.num_layers).argmax())
            missing = self.num_layers - int(layers[at])
            error = TransferFailed(f"slot {first + at} lacks {missing} of {self.num_layers} layers")
            self._report_end(receive, error)
            raise error
        # Blocks of another size may begin before the lease: only the lease's own tokens count.
        self.valid.add(part, parts, receive.planes.tolist(), [(max(begin, grant.begin), end)])
        self.reported_at = time.monotonic()
        self._report_end(receive)
        return self.valid.end

    def _keep(self, receive: Receive) -> bool:
        """Mark the slots of a send that have arrived in every layer as valid: a sender describes only complete blocks.

        Return True if any chunk has arrived.
        """
        if receive.kind is None:
            return False
        part, parts, unit = receive.kind
        unit = unit or self.grant.block_size
        begin, origin = self.grant.begin, first_token(self.grant.begin, unit)
        whole = np.concatenate([_GAP, receive.arrived.all(axis=0), _GAP])
        edges = np.flatnonzero(whole[1:] != whole[:-1]).tolist()
        pieces: Ranges = []
        for first, last in zip(edges[::2], edges[1::2], strict=True):
            piece = max(origin + first * unit, begin), min(origin + last * unit, receive.limit)
            if piece[0] < piece[1]:
                pieces.append(piece)
        self.valid.add(part, parts, receive.planes.tolist(), pieces)
        return True

    def _report_end(self, receive: Receive, error: TercetError | None = None) -> None:
        if receive.traceparent:
            code, reason = ("", "") if error is None else (error.code, error.message)
            lease, ended_ns = self.grant.lease, time.time_ns()
            self._on_receive_end(
                ReceiveEnd(lease, receive.traceparent, receive.began_ns, ended_ns, receive.nbytes, code, reason)
            )


def _not_begun() -> BadRequest:
    return BadRequest("a send must begin with the content of its KV")


T = TypeVar("T")
REMEMBERED_ENDED = 4096
# Minimum interval, in seconds, between a lease's reports while sends into it continue.
REPORT_SECONDS = 0.25


class GrantTable:
    """All open grants of one rank; ``groups`` has the number of layers of each group. Thread-safe.

    ``on_receive_end`` is called for each receive of a traced sender, under the table's lock: it must not wait.
    """

    def __init__(self, *groups: int, on_receive_end: OnReceiveEnd = lambda _: None) -> None:
        self._on_receive_end = on_receive_end
        self._groups = planes_of_groups(groups)
        self._open: dict[str, OpenLease] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._open)

    def grant(self, grant: Grant) -> None:
        """Open a grant; raises :class:`~tercet.protocol.Conflict` if the lease is or was in use."""
        grant.require_whole(len(self._groups))
        opened = OpenLease(grant, self._groups, self._on_receive_end)
        with self._changed:
            # An ended one, too: a grant that arrives late would open blocks of another owner.
            if grant.lease in self._open or grant.lease in self._ended:
                raise Conflict(f"lease {grant.lease} has already been granted", "lease")
            self._open[grant.lease] = opened

    def extend(self, grant: Grant) -> None:
        """Extend a lease: more tokens of its sequence, and more blocks after its blocks.

        Some of its blocks may already be closed: superseded state blocks are not needed but still belong to the lease.

        Raises :class:`~tercet.protocol.LeaseEnded`, or :class:`~tercet.protocol.BadRequest` for anything that is not
        the same lease with more tokens and blocks; the lease is then unchanged.
        """
        grant.require_whole(len(self._groups))
        with self._changed:
            self._find(grant.lease).extend(grant)

    def begin(self, send: SendKey, begun: SendBegin) -> None:
        """Accept a send if its KV is that of the lease's tokens.

        Raises :class:`~tercet.protocol.Conflict` for other KV, :class:`~tercet.protocol.LeaseEnded` or
        :class:`~tercet.protocol.BadRequest`.
        """
        with self._changed:
            self._find(begun.lease).begin(send, begun)

    def content(self, lease: str, end: int) -> Content | None:
        """Return the content of a lease's first ``end`` tokens; None if the lease has ended."""
        opened = self._open.get(lease)
        return None if opened is None else content_of(opened.grant.tokens, opened.grant.salt, end)

    def in_place(self, send: SendKey, lease: str) -> int:
        """Return the number of the lease's first blocks that are valid and not written again; it never decreases.

        ``send`` must have begun. Raises :class:`~tercet.protocol.LeaseEnded` or :class:`~tercet.protocol.BadRequest`.
        """
        with self._changed:
            return self._find(lease).in_place(send)

    def locate(self, chunk: ReadDescriptors, in_place: int = 0) -> Numbers:
        """Return the blocks of a chunk, in slot order; ``NOWHERE`` for the lease's first ``in_place`` blocks.

        Raises :class:`~tercet.protocol.LeaseEnded` or :class:`~tercet.protocol.BadRequest`.
        """
        with self._changed:
            opened = self._find(chunk.lease)
        # Without the lock, which all connections share: the grant itself does not change.
        return opened.locate(chunk, in_place)

    def locate_tokens(self, chunk: ReadDescriptors, in_place: int = 0) -> list[TokenCopy]:
        """Return the copies of a chunk whose sender has another block size, without the first ``in_place`` blocks.

        Raises the errors of :meth:`locate`.
        """
        with self._changed:
            opened = self._find(chunk.lease)
        return opened.locate_tokens(chunk, in_place)

    def write(self, lease: str, step: Callable[[], T]) -> T:
        """Run ``step``, which may write the lease's blocks, and return its result; a revocation waits for it.

        Raises :class:`~tercet.protocol.LeaseEnded` instead if the lease has ended. A step must not wait long for a
        peer.
        """
        with self._changed:
            opened = self._find(lease)
            opened.writers += 1
        try:
            return step()
        finally:
            with self._changed:
                opened.writers -= 1
                if not opened.writers:
                    self._changed.notify_all()

    def overwriting(self, chunk: ReadDescriptors, in_place: int = 0) -> None:
        """Mark a chunk's target as invalid until its send is in place; :meth:`locate` has accepted the chunk.

        Call this before the first byte is written. The lease's first ``in_place`` blocks are left out. Raises
        :class:`~tercet.protocol.TransferFailed` if more blocks are in place now, and
        :class:`~tercet.protocol.LeaseEnded`.
        """
        with self._changed:
            self._find(chunk.lease).overwriting(chunk, in_place)

    def arrived(self, send: SendKey, chunk: ReadDescriptors) -> int | None:
        """Record that a chunk, which :meth:`locate` has accepted, is in place; return the result of :meth:`ended`."""
        with self._changed:
            return self._find(chunk.lease).arrived(send, chunk)

    def ended(self, send: SendKey, end: SendEnd) -> int | None:
        """Record a send's end message; its ``begin`` is rounded down to a block's start.

        Return the lease's valid end once all chunks are in place, None while some are missing. Raises
        :class:`~tercet.protocol.TransferFailed` if a chunk will never arrive; the send's KV is then not valid.
        """
        with self._changed:
            return self._find(end.lease).ended(send, end)

    def forget(self, lease: str, send: SendKey, error: TercetError) -> None:
        """Forget a send that an error ended; the part of it that arrived in every layer is valid."""
        with self._changed:
            opened = self._open.get(lease)
            if opened is not None:
                opened.forget(send, error)

    def forget_sender(self, sender: str) -> list[tuple[str, int]]:
        """Forget the sends of a lost sender; return the lease and valid end of each incomplete send."""
        error = TransferFailed("the sender closed the connection")
        with self._changed:
            lost = [(opened, key) for opened in self._open.values() for key in opened.sends if key[0] == sender]
            half_way = [opened for opened, key in lost if opened.forget(key, error)]
            return [(opened.grant.lease, opened.valid.end) for opened in half_way]

    def progress(self, lease: str, now: float) -> int | None:
        """Return the end of an open lease's valid KV, or None if reported less than :data:`REPORT_SECONDS` ago."""
        with self._changed:
            opened = self._open.get(lease)
            if opened is None or now < opened.reported_at + REPORT_SECONDS:
                return None
            opened.reported_at = now
            return opened.keep()

    @property
    def receives(self) -> int:
        """Number of sends that have begun to arrive and are not complete."""
        with self._changed:
            return sum(found.kind is not None for opened in self._open.values() for found in opened.sends.values())

    def revoke(self, lease: str) -> int | None:
        """End a lease; return the end of its contiguous valid KV, ``grant.begin`` if it has none.

        None means that the lease was not open; it cannot be granted later either.
        """
        with self._changed:
            opened = self._open.pop(lease, None)
            # Remembered, so that late messages learn that the lease has ended, and not that it never existed.
            self._ended[lease] = None
            if len(self._ended) > REMEMBERED_ENDED:
                self._ended.popitem(last=False)
            if opened is None:
                return None
            # The fence: the lease is no longer found, and those that write have found it before.
            self._changed.wait_for(lambda: not opened.writers)
            error = LeaseEnded("the lease ended before all KV had arrived")
            for send in list(opened.sends):
                opened.forget(send, error)
            return opened.valid.end

    def _find(self, lease: str) -> OpenLease:
        opened = self._open.get(lease)
        if opened is None:
            how = "has ended" if lease in self._ended else "was never granted or ended long ago"
            raise LeaseEnded(f"lease {lease} {how}", "kv_addr_info")
        return opened
