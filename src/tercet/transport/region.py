"""One rank's KV cache in a memory file that other processes of the machine can map.

A plane is a layer's blocks, or its keys or its values if the layer keeps them apart::

    0        planes[0]                planes[1]                     words                scratch page        size
    │ offset │ block 0 │ block 1 │ …  │ block 0 │ block 1 │ …  …    │ core's │ sends'  │ words of readers  │
                                                                     512      3584       8 bytes each

Each *generation word* belongs to one running send, and holds the send's number while the send's blocks are pinned. A
process that reads blocks checks the word after the copy: if the number is still there, the blocks were pinned. Only the
engine's core (:class:`CoreWords`) writes the first :data:`CORE_WORDS`.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tercet.protocol import BadRequest, TransferFailed
from tercet.transport.layouts import BlockOrder
from tercet.transport.sockets import Places, Vector, address_of

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
        """The planes of each group."""
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
        """Return the offset of a block."""
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
    """The words of one rank's region by which an engine's core guarantees blocks that are not pinned.

    A stuck core cannot pin blocks. But its last report of its sequences' blocks stays true until it allocates a block
    again: before it does, it changes the number of each of its words, in every rank's region. Such blocks are sent
    under the number that one of these words had when the core reported them. A receiver checks it after the copy, like
    any send's generation word; so it accepts the data only if no block was reallocated before.
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

    def turn(self, epoch: int) -> None:
        """Set the words to those of ``epoch``: data under words of any other epoch is not accepted from now on."""
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
