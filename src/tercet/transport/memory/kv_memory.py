"""The interface that every kind of memory has for sending KV, and the simplest kind: host pages."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from tercet.transport.region import KVRegion, Numbers
from tercet.transport.vectors import Vector


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
