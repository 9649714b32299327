"""One rank's KV cache in a memory file that other processes of the machine can map.

A plane is a layer's blocks, or its keys or its values if the layer keeps them apart::

    0        planes[0]                planes[1]                     words                scratch page        size
    │ offset │ block 0 │ block 1 │ …  │ block 0 │ block 1 │ …  …    │ core's │ sends'  │ words of readers  │
                                                                     512      3584       8 bytes each

Each *generation word* belongs to one running send, and holds the send's number while the send's blocks are pinned. A
process that reads blocks checks the word after the copy: if the number is still there, the blocks were pinned. Only the
engine's core (:class:`CoreWords`) writes the first :data:`CORE_WORDS`.

Two engines may lay out their KV differently. A pipeline stage holds adjacent layers of the
model, and so a run of adjacent layers of each group. In a rank's region the planes of a group lie together. So the
common part of two stages is one run of planes in each group. A block holds its rank's KV heads one after the other. So
if one tensor-parallel degree divides the other, the common part of two ranks is one run of bytes in their blocks::

    sender's rank 0 of 1    h0 ██████  h1 ██████  h2 ██████  h3 ██████    its block: source_offset 2 heads, size 2 heads
                                                     │          │
    receiver's rank 1 of 2                        h2 ██████  h3 ██████    its block: part 0 of 1

Blocks may also have another number of tokens, or their items in another order. Everything else must be equal.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tercet.protocol import BadRequest, KVLayout, TransferFailed
from tercet.transport.sockets import Places, Vector, address_of

# ---- Layers ----------------------------------------------------------------------------------------------------------


class PlaneRun(NamedTuple):
    """A run of ``length`` planes: from ``source`` on in the sender's region, from ``target`` on in the receiver's."""

    source: int
    target: int
    length: int

    def within(self, planes: range) -> PlaneRun | None:
        """Return the part of this run that lies in ``planes`` of the sender, or None."""
        first, stop = max(planes.start, self.source), min(planes.stop, self.source + self.length)
        return PlaneRun(first, first - self.source + self.target, stop - first) if first < stop else None


def runs(source: KVLayout, target: KVLayout, stage: int, receiver: int) -> tuple[PlaneRun, ...] | None:
    """Return the part that stage ``stage`` of the source sends to stage ``receiver`` of the target, or None.

    The result is empty if both have one stage: all planes, with equal numbers. The layouts must have passed
    :meth:`~tercet.protocol.KVLayout.require_mappable`.
    """
    if not source.stages and not target.stages:
        return ()
    total = tuple(map(sum, zip(*(source.stages or target.stages), strict=True)))
    here, there = source.stages or (total,), target.stages or (total,)
    found: list[PlaneRun] = []
    for group in range(len(total)):
        ours, theirs = _held(here, stage, group), _held(there, receiver, group)
        common = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
        if common:
            first, second = sum(here[stage][:group]), sum(there[receiver][:group])
            found.append(PlaneRun(first + common.start - ours.start, second + common.start - theirs.start, len(common)))
    return tuple(found) or None


def _held(stages: Sequence[Sequence[int]], stage: int, group: int) -> range:
    """Return the planes of a group that a stage holds, numbered in the whole model."""
    ends = [0, *itertools.accumulate(counts[group] for counts in stages)]
    return range(ends[stage], ends[stage + 1])


# ---- Heads -----------------------------------------------------------------------------------------------------------


class HeadSlice(NamedTuple):
    """The bytes of a block that are sent: ``[source_offset, source_offset + size)`` of the sender's blocks."""

    source_offset: int
    size: int
    # They fill this one of ``parts`` equal parts of the receiver's blocks.
    part: int = 0
    parts: int = 1


def shared(source: KVLayout, target: KVLayout, rank: int, receiver: int) -> HeadSlice | None:
    """Return the part that rank ``rank`` of the source sends to rank ``receiver`` of the target, or None.

    The result is also None if an earlier rank holds the same heads and sends them. The layouts must have passed
    :meth:`~tercet.protocol.KVLayout.require_mappable`.
    """
    if source.tp_size == target.tp_size and source.block_bytes == target.block_bytes:
        return HeadSlice(0, source.block_bytes) if rank == receiver else None
    here, there = heads(source, rank), heads(target, receiver)
    common = range(max(here.start, there.start), min(here.stop, there.stop))
    if not common or any(common.start in heads(source, earlier) for earlier in range(rank)):
        return None
    head_bytes = source.block_bytes // len(here)
    return HeadSlice(
        source_offset=(common.start - here.start) * head_bytes,
        size=len(common) * head_bytes,
        part=(common.start - there.start) // len(common),
        parts=len(there) // len(common),
    )


def heads(layout: KVLayout, rank: int) -> range:
    """Return the KV heads that a tensor-parallel rank holds; with more ranks than heads, several hold the same one."""
    first = rank * layout.num_kv_heads // layout.tp_size
    return range(first, first + layout.heads_per_rank)


class RankRoute(NamedTuple):
    """The KV that one sending rank has for one receiving rank: a ``head_slice`` of each block of some ``planes``.

    Empty ``planes`` stand for all planes, with equal numbers.
    """

    receiver: int
    head_slice: HeadSlice
    planes: tuple[PlaneRun, ...] = ()


def routes(source: KVLayout, target: KVLayout, rank: int) -> list[RankRoute]:
    """Return the destinations of rank ``rank``'s blocks; empty if other ranks hold the same heads and send them.

    The layouts must have passed :meth:`~tercet.protocol.KVLayout.require_mappable`.
    """
    stage, rank = divmod(rank, source.tp_size)
    found: list[RankRoute] = []
    for receiver in range(target.num_ranks):
        their_stage, their_rank = divmod(receiver, target.tp_size)
        planes = runs(source, target, stage, their_stage)
        head_slice = shared(source, target, rank, their_rank)
        if planes is not None and head_slice is not None:
            found.append(RankRoute(receiver, head_slice, planes))
    return found


# ---- Tokens ----------------------------------------------------------------------------------------------------------
# A token range is cut at the block boundaries of both sides. Inside a block, each head has its keys, then its values.
# Keys lie by dimension, a run of tokens for each; values lie by token. This is the layout of vLLM's portable CPU
# kernels; if kernels group tokens otherwise, blocks of another size are refused.


class BlockShape(msgspec.Struct, frozen=True, array_like=True):
    """One rank's block of one layer: ``tokens`` of ``heads`` heads with ``head_size`` items of ``item_bytes`` each."""

    tokens: int
    heads: int
    head_size: int
    item_bytes: int

    @classmethod
    def of(cls, layout: KVLayout) -> BlockShape | None:
        """Return how a rank's blocks of this layout can be cut between tokens; None if they cannot."""
        if not layout.splits_by_token:
            return None
        items = 2 * layout.heads_per_rank * layout.head_size * layout.block_size
        return cls(layout.block_size, layout.heads_per_rank, layout.head_size, layout.block_bytes // items)

    @property
    def block_bytes(self) -> int:
        """Size of the block in bytes, keys and values together."""
        return 2 * self.heads * self.head_size * self.tokens * self.item_bytes

    def require_sane(self) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` for impossible values."""
        if min(self.tokens, self.heads, self.head_size) < 1 or self.item_bytes not in (1, 2, 4, 8):
            raise BadRequest(
                f"a block cannot have {self.tokens} tokens and {self.heads} heads of {self.head_size} items"
            )


class TokenCopy(NamedTuple):
    """Copy of ``tokens`` tokens: from ``source`` on in the sender's slot, to ``target`` on in the receiver's block."""

    slot: int
    source: int
    block: int
    target: int
    tokens: int


def first_token(begin: int, tokens: int) -> int:
    """Return the first token of a sender's slot 0, for a reservation from ``begin`` on and blocks of ``tokens``."""
    return begin // tokens * tokens


def token_copies(
    slots: range, sender_tokens: int, begin: int, blocks: Sequence[int], receiver_tokens: int
) -> list[TokenCopy]:
    """Return the copies of the tokens in a sender's slots into ``blocks``, which hold the tokens from ``begin`` on.

    Tokens before ``begin`` and after the last block do not belong to the lease and are left out.
    """
    found: list[TokenCopy] = []
    origin, end = first_token(begin, sender_tokens), begin + len(blocks) * receiver_tokens
    for slot in slots:
        start = origin + slot * sender_tokens
        at, stop = max(start, begin), min(start + sender_tokens, end)
        # A slot of the sender may end in the middle of our block, and the next one continue it.
        while at < stop:
            index, offset = divmod(at - begin, receiver_tokens)
            count = min(stop - at, receiver_tokens - offset)
            found.append(TokenCopy(slot, at - start, blocks[index], offset, count))
            at += count
    return found


def copy_tokens(
    source: memoryview, sender: BlockShape, target: memoryview, receiver: BlockShape, heads: int, copy: TokenCopy
) -> None:
    """Carry out one copy, of ``heads`` heads.

    ``source`` and ``target`` are these heads' parts of the sender's and of the receiver's block.
    """
    item = np.dtype(f"u{sender.item_bytes}")
    theirs = np.frombuffer(source, item).reshape(heads, 2, -1)
    ours = np.frombuffer(target, item).reshape(heads, 2, -1)
    there, here = slice(copy.source, copy.source + copy.tokens), slice(copy.target, copy.target + copy.tokens)
    size = sender.head_size
    # Keys lie transposed, one row for each number of a head: so tokens are columns here, and rows for values.
    keys = ours.reshape(heads, 2, size, receiver.tokens)[:, 0]
    keys[:, :, here] = theirs.reshape(heads, 2, size, sender.tokens)[:, 0][:, :, there]
    values = ours.reshape(heads, 2, receiver.tokens, size)[:, 1]
    values[:, here] = theirs.reshape(heads, 2, sender.tokens, size)[:, 1][:, there]


# ---- Items -----------------------------------------------------------------------------------------------------------
# An item is the data of one token and one head: keys and values together, or the single latent of MLA, or fp8 numbers
# with their scales. Attention backends differ only in the order of heads and tokens; an item's bytes are not changed.

Order = Literal["HN", "NH"]


class BlockOrder(msgspec.Struct, frozen=True, array_like=True):
    """Order of a block of ``heads`` times ``tokens`` items.

    ``order`` names the outermost dimension first: heads (``HN``) or tokens (``NH``).
    """

    order: Order
    heads: int
    tokens: int
    item_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.heads * self.tokens * self.item_bytes

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of outer and of inner items."""
        return (self.heads, self.tokens) if self.order == "HN" else (self.tokens, self.heads)


def rearranged(theirs: BlockOrder | None, ours: BlockOrder | None) -> BlockOrder | None:
    """Return the sender's order if a block's items must be reordered; None if the bytes can stay as they are.

    Raises :class:`~tercet.protocol.TransferFailed`, with the difference, for blocks that have other items.
    """
    if theirs is None and ours is None:
        return None
    if theirs is None or ours is None:
        raise TransferFailed(f"blocks: one side has {theirs or ours}, but the other side does not describe its blocks")
    for name in ("heads", "tokens", "item_bytes"):
        if getattr(theirs, name) != getattr(ours, name):
            raise TransferFailed(f"blocks: {name} is {getattr(theirs, name)} there and {getattr(ours, name)} here")
    # With one head, or one token, both orders are the same bytes.
    one_order = theirs.order == ours.order or 1 in ours.sizes
    return None if one_order else theirs


WORDS = 4096
WORD_BYTES = 8
PAGE_BYTES = mmap.PAGESIZE
CORE_WORDS = 512
TAIL_BYTES = WORDS * WORD_BYTES + PAGE_BYTES
# If a mapped file shrinks, a process that reads the lost part is killed. These seals prevent that for good.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Numbers = NDArray[np.int64]
_ZERO = np.zeros(1, dtype=np.int64)


class RegionShape(msgspec.Struct, frozen=True, array_like=True):
    """Layout of a region, in bytes from its start."""

    planes: tuple[int, ...]  # the start of each plane's block 0; its other blocks follow one another
    num_blocks: int
    block_bytes: int
    words: int  # the start of the generation words, which a scratch page follows
    size: int
    # Numbers of consecutive planes that share block tables: the layers of one kind, if a model has several. Without
    # them all planes do. Planes of different groups may be the same memory: a block belongs to one group at a time.
    groups: tuple[int, ...] = ()
    order: BlockOrder | None = None  # of a block's items, if that differs between engines

    @property
    def group_planes(self) -> list[range]:
        return planes_of_groups(self.groups or (len(self.planes),))

    def require_sane(self) -> None:
        """Raise :class:`TransferFailed` unless every block and word lies inside."""
        ends = [plane + self.num_blocks * self.block_bytes for plane in self.planes]
        inside = (
            bool(self.planes)
            and self.num_blocks > 0
            and self.block_bytes > 0
            and min(self.planes) >= 0
            and max(ends) <= self.size
            and 0 <= self.words <= self.size - TAIL_BYTES
            and self.words % WORD_BYTES == 0
            and sum(self.groups or (len(self.planes),)) == len(self.planes)
            and min(self.groups, default=0) >= 0
            and (self.order is None or self.order.block_bytes == self.block_bytes)
        )
        if not inside:
            raise TransferFailed("the peer describes a KV region that is too small for its blocks")

    def block(self, layer: int, block: int) -> int:
        return self.planes[layer] + block * self.block_bytes

    def word(self, number: int) -> int:
        """Return the offset of the generation word of send ``number``."""
        return self.words + number % WORDS * WORD_BYTES

    def scratch(self, number: int) -> int:
        """Return the offset of the word that reader ``number`` of this process may use as scratch."""
        return self.words + WORDS * WORD_BYTES + number * WORD_BYTES % PAGE_BYTES


def planes_of_groups(groups: Sequence[int]) -> list[range]:
    """Return the planes of each group from the groups' sizes: of ``[2, 3]``, ``[0, 2)`` and ``[2, 5)``."""
    ends = list(itertools.accumulate(groups))
    return [range(end - count, end) for end, count in zip(ends, groups, strict=True)]


def shape_of(lengths: Sequence[int], num_blocks: int, block_bytes: int, offsets: Sequence[int] = ()) -> RegionShape:
    """Return the shape of a region of planes, each in separate whole pages.

    ``lengths`` are the planes' bytes; ``offsets[i]`` is the offset of plane i in its first page.
    """
    planes: list[int] = []
    at = 0
    for length, offset in zip(lengths, offsets or [0] * len(lengths), strict=True):
        planes.append(at + offset)
        at = -(-(at + offset + length) // PAGE_BYTES) * PAGE_BYTES
    return RegionShape(tuple(planes), num_blocks, block_bytes, at, at + TAIL_BYTES)


def create_sealed_file(name: str, size: int) -> int:
    """Return a descriptor of a new memory file of zeros that keeps its size; the caller closes the descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def create_file(shape: RegionShape) -> int:
    """Return a :func:`create_sealed_file` for a region."""
    return create_sealed_file("tercet-kv", shape.size)


class KVRegion:
    """This process's mapping of its rank's region. ``fd`` stays open: peers get a descriptor of the same file."""

    def __init__(self, fd: int, shape: RegionShape) -> None:
        self.fd = fd
        self.shape = shape
        self._map = mmap.mmap(fd, shape.size)
        self.bytes = memoryview(self._map)
        self._address = address_of(self.bytes)
        words = self.bytes[shape.words : shape.words + WORDS * WORD_BYTES]
        self._words = words.cast("Q")

    @classmethod
    def create(
        cls, num_layers: int, num_blocks: int, block_bytes: int, offset: int = 0, groups: tuple[int, ...] = ()
    ) -> KVRegion:
        """Return a new region, for tests and benchmarks; a real one is made from an engine's KV cache."""
        lengths, offsets = [num_blocks * block_bytes] * num_layers, [offset] * num_layers
        shape = msgspec.structs.replace(shape_of(lengths, num_blocks, block_bytes, offsets), groups=groups)
        return cls(create_file(shape), shape)

    @property
    def num_layers(self) -> int:
        """Number of layers, or of planes if a layer keeps keys and values apart."""
        return len(self.shape.planes)

    def blocks(self, layer: int, first: int, count: int = 1) -> memoryview:
        """Return ``count`` adjacent blocks, in place; raise :class:`~tercet.protocol.BadRequest` for unknown ones."""
        if not (0 <= layer < self.num_layers and first >= 0 and 0 < count <= self.shape.num_blocks - first):
            raise BadRequest(
                f"blocks [{first}, {first + count}) of layer {layer} are not among {self.num_layers} layers "
                f"of {self.shape.num_blocks} blocks"
            )
        start = self.shape.block(layer, first)
        return self.bytes[start : start + count * self.shape.block_bytes]

    def places(self, layers: range, blocks: Numbers, offset: int, size: int) -> Places:
        """Return the places of bytes ``[offset, offset + size)`` of each layer's blocks, adjacent whole blocks joined.

        Raises :class:`~tercet.protocol.BadRequest` for unknown blocks.
        """
        first, last = int(blocks.min()), int(blocks.max())
        for layer in layers:
            self.blocks(layer, first, last - first + 1)
        lengths: Numbers | int = size
        if size == self.shape.block_bytes:
            blocks, counts = neighbours(blocks)
            lengths = counts * size
        within = np.empty((len(blocks), 2), dtype=np.uint64)
        within[:, 0] = blocks * self.shape.block_bytes
        within[:, 1] = lengths
        start = self._address + offset
        begins = np.array([(start + self.shape.planes[layer], 0) for layer in layers], dtype=np.uint64)
        return (begins[:, None] + within).reshape(-1, 2)

    def set_word(self, number: int) -> None:
        """Record that the blocks of send ``number`` are pinned from now on."""
        self._words[number % WORDS] = number

    def clear_word(self, number: int) -> None:
        """Record that the blocks of send ``number`` may be unpinned from now on."""
        if self._words[number % WORDS] == number:
            self._words[number % WORDS] = 0

    def has_word(self, number: int) -> bool:
        """Return True if the blocks of send ``number`` are still pinned."""
        return self._words[number % WORDS] == number

    def close(self) -> None:
        """Close the file. The mapping ends with its last user."""
        os.close(self.fd)


def neighbours(blocks: Numbers) -> tuple[Numbers, Numbers | int]:
    """Group adjacent blocks: of ``[5, 6, 7, 2]``, return the firsts ``[5, 2]`` and the counts ``[3, 1]``."""
    apart = blocks[1:] - blocks[:-1] != 1
    if apart.all():
        return blocks, 1
    first, counts = groups(apart)
    return blocks[first], counts


def groups(apart: NDArray[np.bool_]) -> tuple[Numbers, Numbers]:
    """Return the beginnings and sizes of groups; ``apart[i]`` is True if another group begins after item i."""
    edges = np.concatenate((_ZERO, apart.nonzero()[0] + 1, [len(apart) + 1]))
    return edges[:-1], edges[1:] - edges[:-1]


class CoreWords:
    """Epoch counters, seqlock style: a counter that is unchanged after a copy shows that no block was reused.

    A stuck core cannot pin blocks. But its last report of its sequences' blocks stays true until it allocates a block
    again: before it does, it advances the epoch in each of its words, in every rank's region. Such blocks are sent
    under the number that one of these words had when the core reported them. A receiver reads it again after the copy,
    like any send's generation word, and accepts the data only if it is the same.
    """

    def __init__(self, path: str, offset: int) -> None:
        """Map the words. Raise ``OSError``, or ``ValueError`` for an invalid place."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(fd, CORE_WORDS * WORD_BYTES, offset=offset)
        finally:
            os.close(fd)
        self._words = np.frombuffer(self._map, dtype=np.int64)
        self._first = np.arange(CORE_WORDS, dtype=np.int64)

    def advance(self, epoch: int) -> None:
        """Begin ``epoch``: data under words of any other epoch is not accepted from now on."""
        np.add(self._first, epoch * WORDS, out=self._words)


def core_word(epoch: int, index: int) -> int:
    """Return the number of the core's word ``index`` in ``epoch``; no other epoch has it."""
    return epoch * WORDS + index


def is_core_word(number: int) -> bool:
    """True if only a core uses this number."""
    return number % WORDS < CORE_WORDS


class KVMemory(Protocol):
    """One rank's KV, by plane and block."""

    def reading(self, layers: range, blocks: Numbers, offset: int, size: int) -> AbstractContextManager[Vector]:
        """Yield the memory of bytes ``[offset, offset + size)`` of each layer's blocks, for sending.

        The order is layer by layer, and within each that of ``blocks``. Raises :class:`~tercet.protocol.BadRequest` for
        unknown blocks.
        """
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


class HostPages(KVMemory):
    """KV in pages of the host; bytes are sent directly from there."""

    def __init__(self, region: KVRegion) -> None:
        self._region = region

    def reading(self, layers: range, blocks: Numbers, offset: int, size: int) -> AbstractContextManager[Vector]:
        places = self._region.places(layers, blocks, offset, size)
        return nullcontext(Vector(places, self._region, len(layers) * len(blocks) * size))

    def close(self) -> None:
        """Do nothing: the region belongs to its owner."""
