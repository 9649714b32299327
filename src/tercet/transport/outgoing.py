"""One send as its sender describes it: its blocks, their chunks, and the result."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tercet.protocol import Content, TercetError
from tercet.transport.core_words import is_core_word
from tercet.transport.head_slices import HeadSlice
from tercet.transport.layer_runs import PlaneRun
from tercet.transport.peer_messages import BLOCK_NUMBER, ReadDescriptors, SendBegin, SendEnd, framed
from tercet.transport.region import Numbers

# A number is never repeated in a process, on any connection: a reader that checks a generation word late must not find
# the number of a send that has ended. The core's words have separate numbers.
send_numbers = itertools.filterfalse(is_core_word, itertools.count(1 + secrets.randbits(62)))


@dataclass(frozen=True)
class SendReport:
    """Result of a send that is in place at the receiver: bytes of KV, number of chunks, and the transport."""

    bytes: int
    chunks: int
    transport: str = ""


OnDone = Callable[[SendReport | TercetError], None]


@dataclass(eq=False)
class Leg:
    """A send of ``content`` to one receiving rank, under ``lease``; ``head_slice`` is its part of each block.

    ``planes`` are those that the rank gets, all of them if empty. ``chunks`` are those that the receiver was told to
    read. ``on_done`` is called once, without locks of the transport. ``number`` identifies the send. It is also the
    value of its generation word, which is written here while the blocks are pinned, or by the core
    (:mod:`.core_words`), whose number must not be cleared here. ``traceparent`` is its place in a sampled trace, or
    empty.
    """

    lease: str
    content: Content
    head_slice: HeadSlice
    on_done: OnDone
    number: int = field(default_factory=lambda: next(send_numbers))
    planes: tuple[PlaneRun, ...] = ()
    traceparent: str = ""
    chunks: list[ReadDescriptors] = field(default_factory=list[ReadDescriptors])
    begun: bool = False  # True once the receiver has the begin message
    finished_at: float | None = None  # when the receiver got the end message
    readers: int = 0  # threads that are writing its blocks to the receiver
    outcome: SendReport | TercetError | None = None
    told: bool = False

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


def parts_of(layers: range, planes: Sequence[PlaneRun]) -> list[PlaneRun]:
    """Return the parts of ``layers`` that go to ``planes``; all of them if ``planes`` is empty."""
    if not planes:
        return [PlaneRun(layers.start, layers.start, len(layers))]
    return [found for run in planes if (found := run.within(layers)) is not None]


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
