"""What every kind of memory offers to who sends KV, and the kind that needs nothing: host pages."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from tercet.transport.region import KVRegion, Numbers
from tercet.transport.vectors import Vector


class KVMemory(Protocol):
    """One rank's KV, by plane and block."""

    def reading(self, layers: range, blocks: Numbers, offset: int, size: int) -> AbstractContextManager[Vector]:
        """Where bytes ``[offset, offset + size)`` of each layer's blocks can be sent from, while it is entered.

        Layer by layer, and of each in the order of ``blocks``. Raises :class:`~tercet.protocol.BadRequest` for blocks
        that there are not.
        """
        ...

    def close(self) -> None:
        """Give back what it took."""
        ...


class HostPages(KVMemory):
    """KV in pages of the host: bytes are sent from where they lie."""

    def __init__(self, region: KVRegion) -> None:
        self._region = region

    def reading(self, layers: range, blocks: Numbers, offset: int, size: int) -> AbstractContextManager[Vector]:
        places = self._region.places(layers, blocks, offset, size)
        return nullcontext(Vector(places, self._region, len(layers) * len(blocks) * size))

    def close(self) -> None:
        """The region is its owner's."""
