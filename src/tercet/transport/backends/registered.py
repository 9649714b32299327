"""Common code of backends that use a library: the region by its address, and a reader that fetches words into it."""

from __future__ import annotations

import ctypes
import os
import secrets
from typing import TypeVar

import msgspec
import numpy as np

from tercet.protocol.wire import UNREADABLE
from tercet.transport.backends.reading import BackendUnavailable, Batch, Copies, Fence, Reader, in_steps
from tercet.transport.region import PAGE_BYTES, WORD_BYTES, KVRegion, RegionShape

T = TypeVar("T")
INFINIBAND = "/sys/class/infiniband"
# In bytes. Each request to a library has a fixed cost, so requests are large.
READ_BYTES = 32 * 1024 * 1024


class RegisteredRegion:
    """A region's bytes by address; it keeps the mapping alive as long as a library may know that address.

    The words of its scratch page are slots. Each reader has its own slot, into which it fetches words of other regions.
    A slot is given as an offset in bytes from the region's start. Thread-safe.
    """

    def __init__(self, region: KVRegion) -> None:
        self._anchor = ctypes.c_char.from_buffer(region.bytes)
        self._bytes = region.bytes
        self.address = ctypes.addressof(self._anchor)
        self.size = region.shape.size
        self._free = [region.shape.scratch(number) for number in range(PAGE_BYTES // WORD_BYTES)]

    def take_slot(self) -> int:
        """Take a slot. Raise :class:`BackendUnavailable` if open readers use all slots."""
        try:
            return self._free.pop()
        except IndexError:
            raise BackendUnavailable(
                "this rank already reads from the maximum number of senders; close sessions first"
            ) from None

    def give_back(self, slot: int) -> None:
        """Free a closed reader's slot."""
        self._free.append(slot)

    def word(self, slot: int) -> int:
        """Read the word in the slot."""
        return int.from_bytes(self._bytes[slot : slot + WORD_BYTES], "little")

    def set_word(self, slot: int, word: int) -> None:
        """Write a word to the slot."""
        self._bytes[slot : slot + WORD_BYTES] = word.to_bytes(WORD_BYTES, "little")


class RegisteredReader(Reader):
    """Reader of a sender's region of shape ``theirs`` into ``ours``. A library's subclass implements the copy."""

    def __init__(self, ours: RegisteredRegion, theirs: RegionShape) -> None:
        self._ours, self._theirs = ours, theirs
        self._slot = ours.take_slot()

    def copy(self, copies: Copies) -> None:
        """Copy bytes; raise :class:`~tercet.protocol.TransferFailed` after the last write."""
        raise NotImplementedError

    def read(self, batch: Batch, fence: Fence) -> bool:
        for some, nbytes in in_steps(batch.rows, READ_BYTES):
            fence(lambda some=some, nbytes=nbytes: self.copy(some) or nbytes)
        return self.word(self._theirs.word(batch.send)) == batch.send

    def word(self, there: int) -> int:
        """Read an aligned word of the sender's region, after all earlier copies."""
        self._ours.set_word(self._slot, 0)  # so a value found there later was fetched later
        self.copy(np.array([(WORD_BYTES, there, self._slot)]))
        return self._ours.word(self._slot)

    def require_own_word(self, name: str) -> None:
        """Check a reader of this rank's region, and close it: it must read a random word back."""
        slot, word = self._ours.take_slot(), secrets.randbits(63) + 1
        try:
            self._ours.set_word(slot, word)
            if self.word(slot) != word:
                raise BackendUnavailable(f"{name}: the self-check read other bytes than were in memory")
        finally:
            self._ours.give_back(slot)
            self.close()

    def close(self) -> None:
        self._ours.give_back(self._slot)


def understood(name: str, offer: bytes, kind: type[T]) -> T:
    """Decode a sender's offer; raise :class:`BackendUnavailable` if it is invalid."""
    try:
        return msgspec.msgpack.decode(offer, type=kind)
    except UNREADABLE as error:
        raise BackendUnavailable(f"{name}: the sender's offer cannot be decoded: {error}") from error


def has_rdma() -> bool:
    """True if this machine has an RDMA device."""
    try:
        return bool(os.listdir(INFINIBAND))
    except OSError:
        return False
