"""Who may write where: the receiver's side of leases, as a state machine without I/O.

The invariant that everything rests on: once :meth:`GrantTable.revoke` has returned, no byte is written under that
lease. Whoever writes is inside :meth:`GrantTable.write` meanwhile, never waits for a peer there for more than a few
milliseconds, and is waited for.

This is the transport's one ledger of leases: what is granted, and what of each send has arrived. A send's end and the
chunks that it covers may come in any order. It holds once every block of every layer of its range is in place, and is
refused once all chunks are here and something is missing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from tercet.protocol import BadRequest, Conflict, LeaseEnded, TransferFailed
from tercet.transport.block_sizes import Move, first_token, moves
from tercet.transport.peer_messages import ReadDescriptors, SendEnd
from tercet.transport.region import Numbers

T = TypeVar("T")
REMEMBERED_ENDED = 4096
MAX_PARTS = 1024
MAX_SENDS = 64  # under one lease at a time


class Grant(msgspec.Struct, frozen=True):
    """Blocks that a peer may write under ``lease``.

    ``blocks[i]``, slot i, holds the tokens from ``begin + i * block_size`` on; ``begin`` is a multiple of
    ``block_size``, and the slots reach to ``end``.
    """

    lease: str
    blocks: Sequence[int]
    begin: int
    end: int
    block_size: int


@dataclass
class _Receive:
    """One send under a lease: what has arrived, by layer and slot, and its end once that is here."""

    part: int
    parts: int
    unit: int
    arrived: NDArray[np.bool_]
    chunks: int = 0
    ended: SendEnd | None = None


# Who sends, and that one's number for the send.
SendKey = tuple[str, int]
# Disjoint token ranges, sorted, not touching.
Ranges = list[tuple[int, int]]


@dataclass
class _Lease:
    grant: Grant
    numbers: Numbers  # the grant's blocks
    sends: dict[SendKey, _Receive] = field(default_factory=dict[SendKey, _Receive])
    # For each way to cut blocks into parts: what is valid of each part.
    valid: dict[int, dict[int, Ranges]] = field(default_factory=dict[int, dict[int, Ranges]])
    writers: int = 0


class GrantTable:
    """All open grants of one rank. Thread-safe."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._open: dict[str, _Lease] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._open)

    def grant(self, grant: Grant) -> None:
        """Open a grant; raises :class:`~tercet.protocol.Conflict` if the lease is or was in use."""
        needed = -(-(grant.end - grant.begin) // grant.block_size)
        if needed != len(grant.blocks) or grant.begin % grant.block_size:
            raise BadRequest(f"blocks: {len(grant.blocks)} do not hold [{grant.begin}, {grant.end})", "blocks")
        opened = _Lease(grant, np.array(grant.blocks, dtype=np.int64))
        with self._changed:
            if grant.lease in self._open or grant.lease in self._ended:
                raise Conflict(f"lease {grant.lease} was granted before", "lease")
            self._open[grant.lease] = opened

    def locate(self, chunk: ReadDescriptors) -> Numbers:
        """The blocks that a chunk goes to, in slot order.

        Raises :class:`~tercet.protocol.LeaseEnded` or :class:`~tercet.protocol.BadRequest`.
        """
        return self._open_for(chunk).numbers[chunk.begin : chunk.end]

    def locate_tokens(self, chunk: ReadDescriptors) -> list[Move]:
        """As :meth:`locate`, for a sender whose blocks have another size."""
        grant, slots = self._open_for(chunk).grant, range(chunk.begin, chunk.end)
        return moves(slots, chunk.unit, grant.begin, grant.blocks, grant.block_size)

    def _open_for(self, chunk: ReadDescriptors) -> _Lease:
        with self._changed:
            opened = self._find(chunk.lease)
        num_slots = _num_slots(opened.grant, chunk.unit)
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
        """Run ``step``, which may write the lease's blocks: a revocation waits for it. Returns what it returns.

        Raises :class:`~tercet.protocol.LeaseEnded` instead if the lease is over. A step never waits long for a peer.
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

    def overwriting(self, chunk: ReadDescriptors) -> None:
        """Where a chunk goes, which :meth:`locate` has found right, nothing is valid until its send is in place.

        To be called before the first byte is written. Raises :class:`~tercet.protocol.LeaseEnded`.
        """
        with self._changed:
            opened = self._find(chunk.lease)
            unit = chunk.unit or opened.grant.block_size
            origin = first_token(opened.grant.begin, unit)
            gone = (origin + chunk.begin * unit, origin + chunk.end * unit)
            for parts, valid in opened.valid.items():
                for part, ranges in valid.items():
                    # As fractions of a block: the parts may be cut in another way.
                    if part * chunk.parts < (chunk.part + 1) * parts and chunk.part * parts < (part + 1) * chunk.parts:
                        valid[part] = _without(ranges, gone)

    def arrived(self, send: SendKey, chunk: ReadDescriptors) -> int | None:
        """A chunk, which :meth:`locate` has found right, is in place; returns as :meth:`ended` does."""
        with self._changed:
            opened = self._find(chunk.lease)
            found = self._receive_of(opened, send, chunk)
            found.chunks += 1
            found.arrived[chunk.layer : chunk.layer + chunk.layers, chunk.begin : chunk.end] = True
            return self._settle(opened, send, found)

    def ended(self, send: SendKey, end: SendEnd) -> int | None:
        """Take a send's end; its ``begin`` counts from its block's start.

        Returns the lease's valid end once everything is in place, ``None`` while chunks are on their way. Raises
        :class:`~tercet.protocol.TransferFailed` if one is missing for good; nothing becomes valid then.
        """
        with self._changed:
            opened = self._find(end.lease)
            grant = opened.grant
            if not grant.begin <= end.begin < end.end <= grant.end:
                raise BadRequest(f"[{end.begin}, {end.end}) is outside the lease's [{grant.begin}, {grant.end})")
            found = self._receive_of(opened, send, end)
            if found.ended is not None:
                raise BadRequest("a send ends once")
            found.ended = end
            return self._settle(opened, send, found)

    def forget(self, lease: str, send: SendKey) -> None:
        """A send that will not be completed; what it wrote is not valid."""
        with self._changed:
            opened = self._open.get(lease)
            if opened is not None:
                opened.sends.pop(send, None)

    def forget_sender(self, sender: str) -> int:
        """Forget every send of a sender that is gone; returns how many were half-way."""
        with self._changed:
            lost = [(opened, key) for opened in self._open.values() for key in opened.sends if key[0] == sender]
            for opened, key in lost:
                del opened.sends[key]
            return len(lost)

    @property
    def receives(self) -> int:
        """Sends that have begun to arrive and are not complete."""
        with self._changed:
            return sum(len(opened.sends) for opened in self._open.values())

    def revoke(self, lease: str) -> int | None:
        """End a lease; returns the end of the contiguous valid KV (``grant.begin`` if there is none).

        ``None`` says that it was not open; it cannot be granted any more then either.
        """
        with self._changed:
            opened = self._open.pop(lease, None)
            self._ended[lease] = None
            if len(self._ended) > REMEMBERED_ENDED:
                self._ended.popitem(last=False)
            if opened is None:
                return None
            self._changed.wait_for(lambda: not opened.writers)
            return _valid_end(opened)

    def _find(self, lease: str) -> _Lease:
        opened = self._open.get(lease)
        if opened is None:
            how = "has ended" if lease in self._ended else "was never granted or ended long ago"
            raise LeaseEnded(f"lease {lease} {how}", "kv_addr_info")
        return opened

    def _receive_of(self, opened: _Lease, send: SendKey, message: ReadDescriptors | SendEnd) -> _Receive:
        found, part, parts, unit = opened.sends.get(send), message.part, message.parts, message.unit
        same = found is None or (found.part, found.parts, found.unit) == (part, parts, unit)
        if not (same and 0 <= part < parts <= MAX_PARTS):
            raise BadRequest("a send fills one part of the blocks, always the same")
        if found is None:
            if len(opened.sends) >= MAX_SENDS:
                raise BadRequest(f"a lease takes {MAX_SENDS} sends at a time")
            arrived = np.zeros((self._num_layers, _num_slots(opened.grant, unit)), dtype=np.bool_)
            found = opened.sends[send] = _Receive(part, parts, unit, arrived)
        return found

    def _settle(self, opened: _Lease, send: SendKey, found: _Receive) -> int | None:
        if found.ended is None or found.chunks < found.ended.chunks:
            return None
        del opened.sends[send]
        grant, end = opened.grant, found.ended.end
        unit = found.unit or grant.block_size
        begin, origin = first_token(found.ended.begin, unit), first_token(grant.begin, unit)
        first = (begin - origin) // unit
        covered = found.arrived[:, first : -(-(end - origin) // unit)]
        if not covered.all():
            layers = covered.sum(axis=0)
            at = int((layers < self._num_layers).argmax())
            missing = self._num_layers - int(layers[at])
            raise TransferFailed(f"slot {first + at} lacks {missing} of {self._num_layers} layers")
        parts = opened.valid.setdefault(found.parts, {})
        parts[found.part] = _merged(parts.get(found.part, []), (max(begin, grant.begin), end))
        return _valid_end(opened)


def _num_slots(grant: Grant, unit: int) -> int:
    """How many of a sender's slots, of ``unit`` tokens each, a grant's blocks touch."""
    unit = unit or grant.block_size
    end = grant.begin + len(grant.blocks) * grant.block_size
    return -(-(end - first_token(grant.begin, unit)) // unit)


def _valid_end(opened: _Lease) -> int:
    """How far the KV is valid from the lease's beginning: in all parts, for some way to cut blocks into parts."""
    begin = opened.grant.begin
    ends = [begin]
    for parts, valid in opened.valid.items():
        firsts = [valid[part][:1] if part in valid else [] for part in range(parts)]
        ends.append(min(first[0][1] if first and first[0][0] == begin else begin for first in firsts))
    return max(ends)


def _merged(ranges: Ranges, new: tuple[int, int]) -> Ranges:
    """Add a range to disjoint sorted ones, joining those that touch."""
    begin, end = new
    kept: Ranges = []
    for low, high in ranges:
        if high < begin or end < low:
            kept.append((low, high))
        else:
            begin, end = min(begin, low), max(end, high)
    return sorted([*kept, (begin, end)])


def _without(ranges: Ranges, gone: tuple[int, int]) -> Ranges:
    """Take a range out of disjoint sorted ones."""
    begin, end = gone
    pieces = [piece for low, high in ranges for piece in ((low, min(high, begin)), (max(low, end), high))]
    return [(low, high) for low, high in pieces if low < high]
