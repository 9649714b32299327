"""What the backends on top of a library share: where a region lies in this process, and places for fetched words."""

from __future__ import annotations

import ctypes
import os
import secrets
import threading
from collections.abc import Callable

from tercet.transport.backends.reading import BackendUnavailable
from tercet.transport.region import PAGE_BYTES, WORD_BYTES, KVRegion

INFINIBAND = "/sys/class/infiniband"
# Each request to a library has its price, so they are large.
READ_BYTES = 32 * 1024 * 1024


class Placed:
    """A region's bytes by address; keeps the mapping alive as long as a library may know that address."""

    def __init__(self, region: KVRegion) -> None:
        self._anchor = ctypes.c_char.from_buffer(region.bytes)
        self.address = ctypes.addressof(self._anchor)
        self.size = region.shape.size


class WordSlots:
    """The words of a region's scratch page, each for one reader at a time. Thread-safe."""

    def __init__(self, region: KVRegion) -> None:
        self._region = region
        self._free = list(range(PAGE_BYTES // WORD_BYTES))
        self._lock = threading.Lock()

    def take(self) -> int:
        """A slot's number; raises :class:`BackendUnavailable` when as many readers as there are slots are open."""
        with self._lock:
            if not self._free:
                raise BackendUnavailable("no more senders can be read from: close sessions first")
            return self._free.pop()

    def give_back(self, slot: int) -> None:
        """The slot's reader is closed."""
        with self._lock:
            self._free.append(slot)

    def place(self, slot: int) -> int:
        """Where the slot is, in bytes from the region's start."""
        return self._region.shape.scratch(slot)

    def clear(self, slot: int) -> None:
        """Make sure that what is found there later was fetched later."""
        self._put(slot, 0)

    def value(self, slot: int) -> int:
        """The word that is there."""
        at = self.place(slot)
        return int.from_bytes(self._region.bytes[at : at + WORD_BYTES], "little")

    def require_readable(self, read_word: Callable[[int], int], name: str) -> None:
        """The self-check: a random word of our own must come back through ``read_word``, given where it is."""
        slot, word = self.take(), secrets.randbits(63) + 1
        try:
            self._put(slot, word)
            if read_word(self.place(slot)) != word:
                raise BackendUnavailable(f"{name}: its self-check read other bytes than were in memory")
        finally:
            self._put(slot, 0)
            self.give_back(slot)

    def _put(self, slot: int, word: int) -> None:
        at = self.place(slot)
        self._region.bytes[at : at + WORD_BYTES] = word.to_bytes(WORD_BYTES, "little")


def has_rdma() -> bool:
    """Whether this machine has an RDMA device."""
    try:
        return bool(os.listdir(INFINIBAND))
    except OSError:
        return False
