"""Who may write where: the receiver's side of leases, as a state machine without I/O.

The invariant that everything rests on: once :meth:`GrantTable.revoke` has returned, no byte is written under that
lease. Hence copies happen inside the table's lock, and data reaches it in scratch memory, never from a socket.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tercet.protocol import BadRequest, Conflict, LeaseEnded, TransferFailed, UnknownSequence
from tercet.transport.memory import runs

REMEMBERED_ENDED = 4096
Copy = Callable[[Sequence[tuple[int, int]]], None]


@dataclass(frozen=True)
class Grant:
    """Blocks that a peer may write under ``lease``.

    ``blocks[i]``, slot i, holds the tokens from ``begin + i * block_size`` on; ``begin`` is a multiple of
    ``block_size``, and the slots reach to ``end``.
    """

    lease: str
    blocks: tuple[int, ...]
    begin: int
    end: int
    block_size: int


@dataclass
class _Open:
    grant: Grant
    arrived: list[int]  # per slot, a bit for each layer
    valid: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # disjoint, sorted, not touching


class GrantTable:
    """All open grants of one rank. Thread-safe."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._complete = (1 << num_layers) - 1
        self._open: dict[str, _Open] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def grant(self, grant: Grant) -> None:
        """Open a grant; raises :class:`~tercet.protocol.Conflict` if the lease is or was in use."""
        needed = -(-(grant.end - grant.begin) // grant.block_size)
        if needed != len(grant.blocks) or grant.begin % grant.block_size:
            raise BadRequest(f"blocks: {len(grant.blocks)} do not hold [{grant.begin}, {grant.end})", "blocks")
        with self._lock:
            if grant.lease in self._open or grant.lease in self._ended:
                raise Conflict(f"lease {grant.lease} was granted before", "lease")
            self._open[grant.lease] = _Open(grant, [0] * len(grant.blocks))

    def write(self, lease: str, layer: int, begin: int, end: int, copy: Copy) -> None:
        """Let ``copy`` fill the slots ``[begin, end)`` of one layer, given as runs ``(first block, count)`` in order.

        Raises :class:`~tercet.protocol.LeaseEnded` or :class:`~tercet.protocol.BadRequest`; nothing is written then.
        """
        with self._lock:
            opened = self._find(lease)
            blocks = opened.grant.blocks
            if not (0 <= layer < self._num_layers and 0 <= begin < end <= len(blocks)):
                raise BadRequest(
                    f"slots [{begin}, {end}) of layer {layer} are outside the lease's {len(blocks)} slots "
                    f"and {self._num_layers} layers"
                )
            copy(runs(blocks[begin:end], end - begin))
            for slot in range(begin, end):
                opened.arrived[slot] |= 1 << layer

    def finish(self, lease: str, begin: int, end: int) -> int:
        """Take a sender's claim that tokens ``[begin, end)`` are all here; returns the lease's valid end.

        ``begin`` counts from its block's start. Raises :class:`~tercet.protocol.TransferFailed` if a piece is
        missing; the claim then changes nothing.
        """
        with self._lock:
            opened = self._find(lease)
            grant = opened.grant
            size = grant.block_size
            if not grant.begin <= begin < end <= grant.end:
                raise BadRequest(f"[{begin}, {end}) is outside the lease's [{grant.begin}, {grant.end})")
            begin = begin // size * size
            for slot in range((begin - grant.begin) // size, -(-(end - grant.begin) // size)):
                if opened.arrived[slot] != self._complete:
                    missing = self._num_layers - opened.arrived[slot].bit_count()
                    raise TransferFailed(f"slot {slot} lacks {missing} of {self._num_layers} layers")
            opened.valid = _merged(opened.valid, (begin, end))
            return _valid_end(opened)

    def revoke(self, lease: str) -> int:
        """End a lease; returns the end of the contiguous valid KV (``grant.begin`` if there is none).

        Raises :class:`~tercet.protocol.UnknownSequence` for a lease that is not open.
        """
        with self._lock:
            opened = self._open.pop(lease, None)
            if opened is None:
                raise UnknownSequence(f"lease {lease} is not open")
            self._ended[lease] = None
            if len(self._ended) > REMEMBERED_ENDED:
                self._ended.popitem(last=False)
            return _valid_end(opened)

    def _find(self, lease: str) -> _Open:
        opened = self._open.get(lease)
        if opened is None:
            how = "has ended" if lease in self._ended else "was never granted or ended long ago"
            raise LeaseEnded(f"lease {lease} {how}", "kv_addr_info")
        return opened


def _valid_end(opened: _Open) -> int:
    begin = opened.grant.begin
    return opened.valid[0][1] if opened.valid and opened.valid[0][0] == begin else begin


def _merged(intervals: list[tuple[int, int]], new: tuple[int, int]) -> list[tuple[int, int]]:
    """Add an interval to disjoint sorted ones, joining those that touch."""
    begin, end = new
    kept: list[tuple[int, int]] = []
    for low, high in intervals:
        if high < begin or end < low:
            kept.append((low, high))
        else:
            begin, end = min(begin, low), max(end, high)
    return sorted([*kept, (begin, end)])
