"""One rank's KV cache as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tercet.protocol import BadRequest


class KVMemory(Protocol):
    """``num_layers`` layers of ``num_blocks`` blocks, each ``block_bytes`` bytes and contiguous."""

    @property
    def num_layers(self) -> int:
        """Layers, or planes where a layer keeps keys and values apart."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks of each layer."""
        ...

    @property
    def block_bytes(self) -> int:
        """Size of one block of one layer."""
        ...

    def read(self, layer: int, first_block: int, count: int) -> memoryview:
        """The bytes of ``count`` adjacent blocks, in place.

        Raises :class:`~tercet.protocol.BadRequest` for blocks that there are not: a piece is never cut short.
        """
        ...

    def write(self, layer: int, first_block: int, data: memoryview) -> None:
        """Copy whole blocks in; raises :class:`~tercet.protocol.BadRequest` for blocks that there are not."""
        ...


class BufferMemory:
    """KV in one writable buffer per layer, one block after the other."""

    def __init__(self, layers: Sequence[memoryview], num_blocks: int) -> None:
        sizes = {layer.nbytes for layer in layers}
        if len(sizes) != 1 or next(iter(sizes)) % num_blocks:
            raise ValueError(f"layers of {sorted(sizes)} bytes are not {num_blocks} equal blocks each")
        self._layers = [layer.cast("B") for layer in layers]
        self._num_blocks = num_blocks
        self._block_bytes = next(iter(sizes)) // num_blocks

    @property
    def num_layers(self) -> int:
        """See :class:`KVMemory`."""
        return len(self._layers)

    @property
    def num_blocks(self) -> int:
        """See :class:`KVMemory`."""
        return self._num_blocks

    @property
    def block_bytes(self) -> int:
        """See :class:`KVMemory`."""
        return self._block_bytes

    def read(self, layer: int, first_block: int, count: int) -> memoryview:
        """See :class:`KVMemory`."""
        self._require(layer, first_block, count)
        start = first_block * self._block_bytes
        return self._layers[layer][start : start + count * self._block_bytes]

    def write(self, layer: int, first_block: int, data: memoryview) -> None:
        """See :class:`KVMemory`."""
        self._require(layer, first_block, -(-data.nbytes // self._block_bytes))
        start = first_block * self._block_bytes
        self._layers[layer][start : start + data.nbytes] = data

    def _require(self, layer: int, first: int, count: int) -> None:
        # A negative index would count from the end, and a slice past the end be short, both without an error.
        if not (0 <= layer < len(self._layers) and first >= 0 and count > 0 and first + count <= self._num_blocks):
            raise BadRequest(f"blocks [{first}, {first + count}) of layer {layer} are not in this rank's KV")


def runs(blocks: Sequence[int], longest: int) -> list[tuple[int, int]]:
    """Cut a block list into ``(first, count)`` runs of adjacent blocks, each at most ``longest`` blocks."""
    found: list[tuple[int, int]] = []
    for block in blocks:
        if found:
            first, count = found[-1]
            if block == first + count and count < longest:
                found[-1] = (first, count + 1)
                continue
        found.append((block, 1))
    return found
