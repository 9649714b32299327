"""An open lease: its blocks, the sends that have begun under it, and the valid part of its KV.

A lease is for certain tokens, and a send begins with the content of its KV (:meth:`OpenLease.begin`): other content is
refused before a byte of it is written. Its end and its chunks may arrive in any order. It is complete once every block
of every layer of its range is in place, and refused if all chunks have arrived and a block is missing. Blocks that
arrived in every layer are valid even if their send never ends. KV that is valid from the lease's beginning on, in whole
blocks, may be in use as prefix cache, and is not written again (:meth:`OpenLease.in_place`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tercet.protocol import BadRequest, Conflict, TercetError, TransferFailed, content_of
from tercet.transport.backends.reading import NOWHERE
from tercet.transport.block_sizes import Move, first_token, moves
from tercet.transport.grant import Grant
from tercet.transport.peer_messages import ReadDescriptors, SendBegin, SendEnd
from tercet.transport.receive_traces import OnReceiveEnd, ReceiveTrace
from tercet.transport.region import Numbers
from tercet.transport.validity import Ranges, Validity

MAX_PARTS = 1024
MAX_SENDS = 64  # under one lease at a time
_NOTHING = np.zeros((0, 0), dtype=np.bool_)
_GAP = np.zeros(1, dtype=np.bool_)

# The sender's session, and its number for the send.
SendKey = tuple[str, int]


@dataclass
class Receive:
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


class OpenLease:
    """One open lease of a rank whose groups of layers are ``groups``; ``on_receive_end`` is that of its table.

    Not thread-safe: the table's lock is held in every call except :meth:`locate` and :meth:`locate_tokens`, which read
    only the grant. ``writers`` counts the threads that may write its blocks now. Methods raise
    :class:`~tercet.protocol.BadRequest` for messages that do not fit the lease or the send.
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
        """Accept a send; raise :class:`~tercet.protocol.Conflict` if its KV is not that of the lease's tokens."""
        grant, limit = self.grant, begun.content.end
        if not grant.begin < limit <= grant.end:
            raise BadRequest(f"KV up to token {limit} is outside the lease's [{grant.begin}, {grant.end})")
        if send in self.sends:
            raise BadRequest("a send must begin only once")
        if len(self.sends) >= MAX_SENDS:
            raise BadRequest(f"lease: has {len(self.sends)} sends already; at most {MAX_SENDS} may run at once")
        if content_of(grant.tokens, grant.salt, limit) != begun.content:
            raise Conflict(
                f"the KV is of other tokens, or under another cache salt, than those of lease {grant.lease}: "
                "send the prompt of the prep_recv call",
                "kv_addr_info",
            )
        trace = ReceiveTrace(begun.lease, begun.traceparent) if begun.traceparent else None
        self.sends[send] = Receive(limit, self._planes_of(begun), _NOTHING, trace=trace)

    def in_place(self, send: SendKey) -> int:
        """Return the number of its first blocks that are valid and not written again; ``send`` must have begun."""
        if send not in self.sends:
            raise _not_begun()
        return self._blocks_in_place()

    def locate(self, chunk: ReadDescriptors, in_place: int) -> Numbers:
        """Return the blocks of a chunk, in slot order; :data:`NOWHERE` for the first ``in_place`` blocks."""
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

    def locate_tokens(self, chunk: ReadDescriptors, in_place: int) -> list[Move]:
        """Return the moves of a chunk whose sender has another block size, without the first ``in_place`` blocks."""
        self._require_inside(chunk)
        grant, slots = self.grant, range(chunk.begin, chunk.end)
        (blocks,) = grant.blocks
        found = moves(slots, chunk.unit, grant.begin, blocks, grant.block_size)
        return [move for move in found if move.block not in blocks[:in_place]] if in_place else found

    def overwriting(self, chunk: ReadDescriptors, in_place: int) -> None:
        """Mark a chunk's target as invalid until its send is in place, without the first ``in_place`` blocks.

        Raises :class:`~tercet.protocol.TransferFailed` if more blocks are in place now.
        """
        grant = self.grant
        unit = chunk.unit or grant.block_size
        origin = first_token(grant.begin, unit)
        left_out = grant.begin + in_place * grant.block_size
        kept = grant.begin + self._blocks_in_place() * grant.block_size
        gone = (max(origin + chunk.begin * unit, left_out), origin + chunk.end * unit)
        if gone[0] >= gone[1]:
            return
        if gone[0] < kept:
            raise TransferFailed(f"KV up to token {kept} has arrived from another sender, and is not overwritten")
        planes = range(chunk.layer, chunk.layer + chunk.layers)
        self.valid.remove(chunk.part, chunk.parts, planes, gone)

    def arrived(self, send: SendKey, chunk: ReadDescriptors) -> int | None:
        """Record that a chunk is in place; return the result of :meth:`ended`."""
        found = self._receive_of(send, chunk)
        if not {*range(chunk.layer, chunk.layer + chunk.layers)} <= {*found.planes.tolist()}:
            raise BadRequest("a send must fill only the planes of its begin message")
        found.chunks += 1
        if found.trace is not None:
            found.trace.bytes += chunk.nbytes
        found.arrived[chunk.layer : chunk.layer + chunk.layers, chunk.begin : chunk.end] = True
        return self._settle(send, found)

    def ended(self, send: SendKey, end: SendEnd) -> int | None:
        """Record a send's end message; return the valid end once all chunks are in place, None while some are missing.

        Raises :class:`~tercet.protocol.TransferFailed` if a chunk will never arrive.
        """
        grant = self.grant
        if not grant.begin <= end.begin < end.end <= grant.end:
            raise BadRequest(f"[{end.begin}, {end.end}) is outside the lease's [{grant.begin}, {grant.end})")
        found = self._receive_of(send, end)
        if end.end > found.limit:
            raise BadRequest(f"a send of the first {found.limit} tokens cannot end at token {end.end}")
        if found.ended is not None:
            raise BadRequest("a send must end only once")
        found.ended = end
        return self._settle(send, found)

    def keep(self) -> int:
        """Mark the part of each send that has arrived in every layer as valid; return the valid end."""
        for found in self.sends.values():
            self._keep(found)
        return self.valid.end

    def forget(self, send: SendKey, error: TercetError) -> bool:
        """Forget a send that an error ended; the part of it that arrived in every layer is valid.

        Return True if any chunk of it had arrived.
        """
        found = self.sends.pop(send, None)
        if found is None:
            return False
        has_part = self._keep(found)
        self._tell_end(found, error)
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
        found, kind = self.sends.get(send), (message.part, message.parts, message.unit)
        if found is None:
            raise _not_begun()
        if found.kind not in (None, kind) or not 0 <= message.part < message.parts <= MAX_PARTS:
            raise BadRequest("a send must always fill the same part of the blocks")
        slots = self.grant.num_slots(message.unit)
        if slots > found.arrived.shape[1]:  # the first chunk of the send, or the lease was extended
            arrived = self._unneeded(slots, found.planes, message.unit)
            if found.kind is not None:
                arrived[:, : found.arrived.shape[1]] |= found.arrived
            found.arrived = arrived
        found.kind = kind
        return found

    def _planes_of(self, begun: SendBegin) -> NDArray[np.int64]:
        """Return the planes that a send declares to fill: all, or some ranges."""
        if any(not 0 <= first < stop <= self.num_layers for first, stop in begun.planes):
            raise BadRequest(f"a send fills planes {begun.planes!r:.80}, but this rank has {self.num_layers} planes")
        some = [range(*each) for each in begun.planes] or [range(self.num_layers)]
        return np.unique(np.concatenate(some))

    def _unneeded(self, slots: int, wanted: NDArray[np.int64], unit: int) -> NDArray[np.bool_]:
        """Return True for each layer and slot that a send filling the planes ``wanted`` need not send.

        Those are all other planes, and slots without a block here; blocks of another size are all needed.
        """
        found = np.ones((self.num_layers, slots), dtype=np.bool_)
        found[wanted] = False
        if not unit:
            for planes, numbers in zip(self._groups, self._numbers, strict=True):
                found[planes.start : planes.stop] |= numbers < 0
        return found

    def _settle(self, send: SendKey, found: Receive) -> int | None:
        if found.ended is None or found.chunks < found.ended.chunks:
            return None
        del self.sends[send]
        grant, end = self.grant, found.ended.end
        part, parts, unit = found.ended.part, found.ended.parts, found.ended.unit or grant.block_size
        begin, origin = first_token(found.ended.begin, unit), first_token(grant.begin, unit)
        first = (begin - origin) // unit
        covered = found.arrived[:, first : -(-(end - origin) // unit)]
        if not covered.all():
            layers = covered.sum(axis=0)
            at = int((layers < self.num_layers).argmax())
            missing = self.num_layers - int(layers[at])
            error = TransferFailed(f"slot {first + at} lacks {missing} of {self.num_layers} layers")
            self._tell_end(found, error)
            raise error
        self.valid.add(part, parts, found.planes.tolist(), [(max(begin, grant.begin), end)])
        self.reported_at = time.monotonic()
        self._tell_end(found)
        return self.valid.end

    def _keep(self, found: Receive) -> bool:
        """Mark the slots of a send that have arrived in every layer as valid: a sender describes only complete blocks.

        Return True if any chunk has arrived.
        """
        if found.kind is None:
            return False
        part, parts, unit = found.kind
        unit = unit or self.grant.block_size
        begin, origin = self.grant.begin, first_token(self.grant.begin, unit)
        whole = np.concatenate([_GAP, found.arrived.all(axis=0), _GAP])
        edges = np.flatnonzero(whole[1:] != whole[:-1]).tolist()
        pieces: Ranges = []
        for first, last in zip(edges[::2], edges[1::2], strict=True):
            piece = max(origin + first * unit, begin), min(origin + last * unit, found.limit)
            if piece[0] < piece[1]:
                pieces.append(piece)
        self.valid.add(part, parts, found.planes.tolist(), pieces)
        return True

    def _tell_end(self, found: Receive, error: TercetError | None = None) -> None:
        if found.trace is not None:
            self._on_receive_end(found.trace.end(error))


def _not_begun() -> BadRequest:
    return BadRequest("a send must begin with the content of its KV")
