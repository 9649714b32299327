"""Write permissions: the receiver's side of leases, as a state machine without I/O.

The central invariant: after :meth:`GrantTable.revoke` has returned, no byte is written under that lease. A writing
thread is inside :meth:`GrantTable.write`, never waits for a peer there for more than a few milliseconds, and the
revocation waits for it.

This is the transport's only record of leases: the granted blocks, and the arrived parts of each send. A lease is for
certain tokens, and a send begins with the content of its KV (:meth:`GrantTable.begin`): other content is refused before
a byte of it is written. Its end and its chunks may arrive in any order. It is complete once every block of every layer
of its range is in place, and refused if all chunks have arrived and a block is missing. Blocks that arrived in every
layer are valid even if their send never ends. KV that is valid from the lease's beginning on, in whole blocks, may be
in use as prefix cache, and is not written again (:meth:`GrantTable.in_place`).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tercet.protocol import BadRequest, Conflict, Content, LeaseEnded, TercetError, TransferFailed, content_of
from tercet.transport.backends.reading import NOWHERE
from tercet.transport.block_sizes import Move, first_token, moves
from tercet.transport.grant import Grant
from tercet.transport.peer_messages import ReadDescriptors, SendBegin, SendEnd
from tercet.transport.receive_traces import OnReceiveEnd, ReceiveTrace
from tercet.transport.region import Numbers, planes_of_groups
from tercet.transport.validity import Ranges, Validity

T = TypeVar("T")
REMEMBERED_ENDED = 4096
MAX_PARTS = 1024
MAX_SENDS = 64  # under one lease at a time
# Minimum interval, in seconds, between a lease's reports while sends into it continue.
REPORT_SECONDS = 0.25


@dataclass
class _Receive:
    """One send of the first ``limit`` tokens under a lease; it fills some ``planes``.

    ``arrived`` is True for each layer and slot that has arrived, in one part (``part`` of ``parts``) of blocks of
    ``unit`` tokens; ``ended`` is the send's end message, None before it arrives. ``trace`` is None unless the sender is
    traced.
    """

    limit: int
    planes: NDArray[np.int64]
    arrived: NDArray[np.bool_]
    kind: tuple[int, int, int] | None = None  # part, parts and unit, after the first chunk
    chunks: int = 0
    ended: SendEnd | None = None
    trace: ReceiveTrace | None = None


# The sender's session, and its number for the send.
SendKey = tuple[str, int]


@dataclass
class _Lease:
    grant: Grant
    numbers: Numbers  # the grant's blocks, by group and slot
    valid: Validity
    sends: dict[SendKey, _Receive] = field(default_factory=dict[SendKey, _Receive])
    writers: int = 0
    reported_at: float = field(default_factory=time.monotonic)


class GrantTable:
    """All open grants of one rank; ``groups`` has the number of layers of each group. Thread-safe.

    ``on_receive_end`` is called for each receive of a traced sender, under the table's lock: it must not wait.
    """

    def __init__(self, *groups: int, on_receive_end: OnReceiveEnd = lambda _: None) -> None:
        self._on_receive_end = on_receive_end
        self._groups = planes_of_groups(groups)
        self._num_layers = sum(groups)
        self._open: dict[str, _Lease] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._open)

    def grant(self, grant: Grant) -> None:
        """Open a grant; raises :class:`~tercet.protocol.Conflict` if the lease is or was in use."""
        grant.require_whole(len(self._groups))
        opened = _Lease(grant, np.array(grant.blocks, dtype=np.int64), Validity(grant.begin, self._num_layers))
        with self._changed:
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
            opened = self._find(grant.lease)
            if not grant.continues(opened.grant):
                raise BadRequest(f"lease {grant.lease} cannot be extended: the extension has other tokens or blocks")
            opened.grant, opened.numbers = grant, np.array(grant.blocks, dtype=np.int64)

    def begin(self, send: SendKey, begun: SendBegin) -> None:
        """Accept a send if its KV is that of the lease's tokens.

        Raises :class:`~tercet.protocol.Conflict` for other KV, :class:`~tercet.protocol.LeaseEnded` or
        :class:`~tercet.protocol.BadRequest`.
        """
        with self._changed:
            opened = self._find(begun.lease)
            grant, limit = opened.grant, begun.content.end
            if not grant.begin < limit <= grant.end:
                raise BadRequest(f"KV up to token {limit} is outside the lease's [{grant.begin}, {grant.end})")
            if send in opened.sends:
                raise BadRequest("a send must begin only once")
            if len(opened.sends) >= MAX_SENDS:
                raise BadRequest(f"lease: has {len(opened.sends)} sends already; at most {MAX_SENDS} may run at once")
            if content_of(grant.tokens, grant.salt, limit) != begun.content:
                raise Conflict(
                    f"the KV is of other tokens, or under another cache salt, than those of lease {grant.lease}: "
                    "send the prompt of the prep_recv call",
                    "kv_addr_info",
                )
            trace = ReceiveTrace(begun.lease, begun.traceparent) if begun.traceparent else None
            opened.sends[send] = _Receive(limit, self._planes_of(begun), _NOTHING, trace=trace)

    def content(self, lease: str, end: int) -> Content | None:
        """Return the content of a lease's first ``end`` tokens; None if the lease has ended."""
        opened = self._open.get(lease)
        return None if opened is None else content_of(opened.grant.tokens, opened.grant.salt, end)

    def in_place(self, send: SendKey, lease: str) -> int:
        """Return the number of the lease's first blocks that are valid and not written again; it never decreases.

        ``send`` must have begun. Raises :class:`~tercet.protocol.LeaseEnded` or :class:`~tercet.protocol.BadRequest`.
        """
        with self._changed:
            opened = self._find(lease)
            _begun(opened, send)
            return _blocks_in_place(opened)

    def locate(self, chunk: ReadDescriptors, in_place: int = 0) -> Numbers:
        """Return the blocks of a chunk, in slot order; :data:`NOWHERE` for the lease's first ``in_place`` blocks.

        Raises :class:`~tercet.protocol.LeaseEnded` or :class:`~tercet.protocol.BadRequest`.
        """
        opened = self._open_for(chunk)
        group = next(at for at, planes in enumerate(self._groups) if chunk.layer in planes)
        found = opened.numbers[group, chunk.begin : chunk.end]
        if chunk.layer + chunk.layers > self._groups[group].stop or (found < 0).any():
            raise BadRequest(
                f"slots [{chunk.begin}, {chunk.end}) have no blocks for layer {chunk.layer} and the next ones"
            )
        if in_place > chunk.begin:
            found = found.copy()
            found[: in_place - chunk.begin] = NOWHERE
        return found

    def locate_tokens(self, chunk: ReadDescriptors, in_place: int = 0) -> list[Move]:
        """Return the moves of a chunk whose sender has another block size, without the first ``in_place`` blocks.

        Raises the errors of :meth:`locate`.
        """
        grant, slots = self._open_for(chunk).grant, range(chunk.begin, chunk.end)
        (blocks,) = grant.blocks
        found = moves(slots, chunk.unit, grant.begin, blocks, grant.block_size)
        return [move for move in found if move.block not in blocks[:in_place]] if in_place else found

    def _open_for(self, chunk: ReadDescriptors) -> _Lease:
        with self._changed:
            opened = self._find(chunk.lease)
        num_slots = opened.grant.num_slots(chunk.unit)
        inside = (
            0 <= chunk.layer < chunk.layer + chunk.layers <= self._num_layers
            and 0 <= chunk.begin < chunk.end <= num_slots
        )
        if not (inside and 0 <= chunk.part < chunk.parts <= MAX_PARTS):
            raise BadRequest(
                f"part {chunk.part} of {chunk.parts} of slots [{chunk.begin}, {chunk.end}) of layers [{chunk.layer}, "
                f"{chunk.layer + chunk.layers}) is outside the lease's {num_slots} slots and {self._num_layers} layers"
            )
        return opened

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
            opened = self._find(chunk.lease)
            grant = opened.grant
            unit = chunk.unit or grant.block_size
            origin = first_token(grant.begin, unit)
            left_out, kept = (grant.begin + count * grant.block_size for count in (in_place, _blocks_in_place(opened)))
            gone = (max(origin + chunk.begin * unit, left_out), origin + chunk.end * unit)
            if gone[0] >= gone[1]:
                return
            if gone[0] < kept:
                raise TransferFailed(f"KV up to token {kept} has arrived from another sender, and is not overwritten")
            planes = range(chunk.layer, chunk.layer + chunk.layers)
            opened.valid.remove(chunk.part, chunk.parts, planes, gone)

    def arrived(self, send: SendKey, chunk: ReadDescriptors) -> int | None:
        """Record that a chunk, which :meth:`locate` has accepted, is in place; return the result of :meth:`ended`."""
        with self._changed:
            opened = self._find(chunk.lease)
            found = self._receive_of(opened, send, chunk)
            if not {*range(chunk.layer, chunk.layer + chunk.layers)} <= {*found.planes.tolist()}:
                raise BadRequest("a send must fill only the planes of its begin message")
            found.chunks += 1
            if found.trace is not None:
                found.trace.bytes += chunk.nbytes
            found.arrived[chunk.layer : chunk.layer + chunk.layers, chunk.begin : chunk.end] = True
            return self._settle(opened, send, found)

    def ended(self, send: SendKey, end: SendEnd) -> int | None:
        """Record a send's end message; its ``begin`` is rounded down to a block's start.

        Return the lease's valid end once all chunks are in place, None while some are missing. Raises
        :class:`~tercet.protocol.TransferFailed` if a chunk will never arrive; the send's KV is then not valid.
        """
        with self._changed:
            opened = self._find(end.lease)
            grant = opened.grant
            if not grant.begin <= end.begin < end.end <= grant.end:
                raise BadRequest(f"[{end.begin}, {end.end}) is outside the lease's [{grant.begin}, {grant.end})")
            found = self._receive_of(opened, send, end)
            if end.end > found.limit:
                raise BadRequest(f"a send of the first {found.limit} tokens cannot end at token {end.end}")
            if found.ended is not None:
                raise BadRequest("a send must end only once")
            found.ended = end
            return self._settle(opened, send, found)

    def forget(self, lease: str, send: SendKey, error: TercetError) -> None:
        """Forget a send that an error ended; the part of it that arrived in every layer is valid."""
        with self._changed:
            opened = self._open.get(lease)
            found = None if opened is None else opened.sends.pop(send, None)
            if opened is not None and found is not None:
                self._keep(opened, found)
                self._tell_end(found, error)

    def forget_sender(self, sender: str) -> list[tuple[str, int]]:
        """Forget the sends of a lost sender; return the lease and valid end of each incomplete send."""
        with self._changed:
            lost = [(opened, key) for opened in self._open.values() for key in opened.sends if key[0] == sender]
            half_way = [opened for opened, key in lost if self._lose(opened, opened.sends.pop(key))]
            return [(opened.grant.lease, opened.valid.end) for opened in half_way]

    def progress(self, lease: str, now: float) -> int | None:
        """Return the end of an open lease's valid KV, or None if reported less than :data:`REPORT_SECONDS` ago."""
        with self._changed:
            opened = self._open.get(lease)
            if opened is None or now < opened.reported_at + REPORT_SECONDS:
                return None
            opened.reported_at = now
            for found in opened.sends.values():
                self._keep(opened, found)
            return opened.valid.end

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
            self._ended[lease] = None
            if len(self._ended) > REMEMBERED_ENDED:
                self._ended.popitem(last=False)
            if opened is None:
                return None
            self._changed.wait_for(lambda: not opened.writers)
            for found in opened.sends.values():
                self._keep(opened, found)
                self._tell_end(found, LeaseEnded("the lease ended before all KV had arrived"))
            return opened.valid.end

    def _find(self, lease: str) -> _Lease:
        opened = self._open.get(lease)
        if opened is None:
            how = "has ended" if lease in self._ended else "was never granted or ended long ago"
            raise LeaseEnded(f"lease {lease} {how}", "kv_addr_info")
        return opened

    def _receive_of(self, opened: _Lease, send: SendKey, message: ReadDescriptors | SendEnd) -> _Receive:
        found, kind = _begun(opened, send), (message.part, message.parts, message.unit)
        if found.kind not in (None, kind) or not 0 <= message.part < message.parts <= MAX_PARTS:
            raise BadRequest("a send must always fill the same part of the blocks")
        slots = opened.grant.num_slots(message.unit)
        if slots > found.arrived.shape[1]:  # the first chunk of the send, or the lease was extended
            arrived = self._unneeded(opened, slots, found.planes, message.unit)
            if found.kind is not None:
                arrived[:, : found.arrived.shape[1]] |= found.arrived
            found.arrived = arrived
        found.kind = kind
        return found

    def _planes_of(self, begun: SendBegin) -> NDArray[np.int64]:
        """Return the planes that a send declares to fill: all, or some ranges."""
        if any(not 0 <= first < stop <= self._num_layers for first, stop in begun.planes):
            raise BadRequest(f"a send fills planes {begun.planes!r:.80}, but this rank has {self._num_layers} planes")
        some = [range(*each) for each in begun.planes] or [range(self._num_layers)]
        return np.unique(np.concatenate(some))

    def _unneeded(self, opened: _Lease, slots: int, wanted: NDArray[np.int64], unit: int) -> NDArray[np.bool_]:
        """Return True for each layer and slot that a send filling the planes ``wanted`` need not send.

        Those are all other planes, and slots without a block here; blocks of another size are all needed.
        """
        found = np.ones((self._num_layers, slots), dtype=np.bool_)
        found[wanted] = False
        if not unit:
            for planes, numbers in zip(self._groups, opened.numbers, strict=True):
                found[planes.start : planes.stop] |= numbers < 0
        return found

    def _keep(self, opened: _Lease, found: _Receive) -> bool:
        """Mark the slots of a send that have arrived in every layer as valid: a sender describes only complete blocks.

        Return True if any chunk has arrived.
        """
        if found.kind is None:
            return False
        part, parts, unit = found.kind
        unit = unit or opened.grant.block_size
        begin, origin = opened.grant.begin, first_token(opened.grant.begin, unit)
        whole = np.concatenate([_GAP, found.arrived.all(axis=0), _GAP])
        edges = np.flatnonzero(whole[1:] != whole[:-1]).tolist()
        pieces: Ranges = []
        for first, last in zip(edges[::2], edges[1::2], strict=True):
            piece = max(origin + first * unit, begin), min(origin + last * unit, found.limit)
            if piece[0] < piece[1]:
                pieces.append(piece)
        opened.valid.add(part, parts, found.planes.tolist(), pieces)
        return True

    def _lose(self, opened: _Lease, found: _Receive) -> bool:
        """Keep the arrived part of a send whose sender was lost; return the result of :meth:`_keep`."""
        self._tell_end(found, TransferFailed("the sender closed the connection"))
        return self._keep(opened, found)

    def _tell_end(self, found: _Receive, error: TercetError | None = None) -> None:
        if found.trace is not None:
            self._on_receive_end(found.trace.end(error))

    def _settle(self, opened: _Lease, send: SendKey, found: _Receive) -> int | None:
        if found.ended is None or found.chunks < found.ended.chunks:
            return None
        del opened.sends[send]
        grant, end = opened.grant, found.ended.end
        part, parts, unit = found.ended.part, found.ended.parts, found.ended.unit or grant.block_size
        begin, origin = first_token(found.ended.begin, unit), first_token(grant.begin, unit)
        first = (begin - origin) // unit
        covered = found.arrived[:, first : -(-(end - origin) // unit)]
        if not covered.all():
            layers = covered.sum(axis=0)
            at = int((layers < self._num_layers).argmax())
            missing = self._num_layers - int(layers[at])
            error = TransferFailed(f"slot {first + at} lacks {missing} of {self._num_layers} layers")
            self._tell_end(found, error)
            raise error
        opened.valid.add(part, parts, found.planes.tolist(), [(max(begin, grant.begin), end)])
        opened.reported_at = time.monotonic()
        self._tell_end(found)
        return opened.valid.end


_NOTHING = np.zeros((0, 0), dtype=np.bool_)
_GAP = np.zeros(1, dtype=np.bool_)


def _begun(opened: _Lease, send: SendKey) -> _Receive:
    found = opened.sends.get(send)
    if found is None:
        raise BadRequest("a send must begin with the content of its KV")
    return found


def _blocks_in_place(opened: _Lease) -> int:
    return (opened.valid.end - opened.grant.begin) // opened.grant.block_size
