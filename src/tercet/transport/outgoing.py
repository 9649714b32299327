"""One send, as the sender's threads share it, and what they write for it."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tercet.protocol import TercetError
from tercet.transport.base import OnDone, SendReport
from tercet.transport.frames import MAX_PIECE_BYTES, REFERRED, Header, Kind, Reference, frame
from tercet.transport.mapping import HeadSlice
from tercet.transport.region import KVRegion, Numbers
from tercet.transport.vectors import Places, Vector, address_of

# No smaller frames are made for the sake of further connections.
LEAST_BYTES = 4 * 1024 * 1024

# Never given twice by a process, whatever the connection: a reader that looks at a live word late must not find there
# the number of a send that is over.
_numbers = itertools.count(1 + secrets.randbits(62))


def next_number() -> int:
    """A number for a send, or for a greeting's word."""
    return next(_numbers)


@dataclass(eq=False)
class Outgoing:
    """One send. ``outcome`` is set once; ``on_done`` is called when nobody reads its blocks any more."""

    number: int
    lease: str
    head_slice: HeadSlice
    on_done: OnDone
    bytes: int = 0
    frames: int = 0
    writers: int = 0  # threads that are reading its blocks
    outcome: SendReport | TercetError | None = None
    told: bool = False
    claimed_at: float | None = None  # when FIN was written


@dataclass(frozen=True, eq=False)
class Item:
    """One frame to be written: blocks of some layers, or, with none, the claim that ``[begin, end)`` is complete."""

    outgoing: Outgoing
    begin: int
    end: int
    layers: range = range(1)
    blocks: Numbers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def is_claim(self) -> bool:
        """Whether it has no blocks."""
        return not len(self.blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of KV."""
        return len(self.layers) * len(self.blocks) * self.outgoing.head_slice.size

    def _header(self, kind: Kind, frames: int = 0) -> Header:
        out, part = self.outgoing, self.outgoing.head_slice
        return Header(
            kind, out.number, out.lease, self.layers.start, self.begin, self.end, frames, part.part, part.parts,
            layers=len(self.layers),
        )  # fmt: skip

    def claim(self) -> bytes:
        """As FIN."""
        return self._header(Kind.FIN, self.outgoing.frames).pack()

    def reference(self) -> bytes:
        """As REFERENCE: the receiver copies."""
        head_slice = self.outgoing.head_slice
        blocks = self.blocks.astype(REFERRED).tobytes()
        body = msgspec.msgpack.encode(Reference(blocks, head_slice.source_offset, head_slice.size))
        return frame(self._header(Kind.REFERENCE), body)

    def piece(self) -> bytes:
        """As PIECE: the header, which the bytes follow."""
        return self._header(Kind.PIECE)._replace(nbytes=self.nbytes).pack()

    def places(self, region: KVRegion) -> Places:
        """Where its bytes are."""
        return region.places(
            self.layers, self.blocks, self.outgoing.head_slice.source_offset, self.outgoing.head_slice.size
        )


def by_value(items: Sequence[Item], region: KVRegion) -> Vector:
    """Frames with the KV in them, from where it is."""
    texts = [item.claim() if item.is_claim else item.piece() for item in items]
    text = b"".join(texts)
    at, parts = address_of(text), list[Places]()
    for item, own in zip(items, texts, strict=True):
        parts.append(np.array([(at, len(own))], dtype=np.uint64))
        at += len(own)
        if not item.is_claim:
            parts.append(item.places(region))
    return Vector(np.concatenate(parts), (text, region), len(text) + sum(item.nbytes for item in items))


class OutboundCounters:
    """What was sent, over all peers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = {"bytes_sent": 0, "chunks_sent": 0, "sends_done": 0, "sends_failed": 0, "sessions_lost": 0}

    def count(self, **increments: int) -> None:
        """Add to the named counters."""
        with self._lock:
            for name, increment in increments.items():
                self._values[name] += increment

    def read(self) -> dict[str, int]:
        """All of them."""
        with self._lock:
            return dict(self._values)


def frame_bytes(total: int, streams: int) -> int:
    """KV in a frame at most, for ``total`` bytes over some connections: a share for each, within bounds.

    What either side does between two frames runs out of cold caches, so many small ones cost.
    """
    return min(MAX_PIECE_BYTES, max(LEAST_BYTES, -(-total // streams)))


def units(layers: range, count: int, limit: int) -> Iterator[tuple[range, slice]]:
    """Cut ``count`` blocks in each layer into frames of at most ``limit``: its layers, and which of their blocks.

    A frame has several layers if there is room, or some of one layer's blocks; then they have as many as the others.
    """
    if not count:
        return
    at_once, cuts = max(1, limit // count), -(-count // limit)
    size = -(-count // cuts)
    for first in range(0, len(layers), at_once):
        for start in range(0, count, size):
            yield layers[first : first + at_once], slice(start, min(start + size, count))
