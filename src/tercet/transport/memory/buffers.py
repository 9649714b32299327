"""Staging buffers: a ledger without I/O of each buffer's state, and a pool where threads wait for one.

A buffer has one owner at a time. The owner may be gone (a cancelled send, a broken connection) while a device still
copies from or into the buffer: then it stays unavailable until that copy has ended, however late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from tercet.protocol import TransferFailed

# Time limit in seconds. Every step of a transfer has a timeout, so a transfer holds a buffer for less time.
WAIT_SECONDS = 60.0


class BufferLedger:
    """States of ``count`` buffers by number. No I/O; not thread-safe."""

    def __init__(self, count: int) -> None:
        self._free = list(reversed(range(count)))
        self._taken: set[int] = set()
        self._copying: set[int] = set()

    @property
    def free(self) -> int:
        """Number of free buffers."""
        return len(self._free)

    def take(self) -> int | None:
        """Take a free buffer and return its number; None if all are taken."""
        if not self._free:
            return None
        number = self._free.pop()
        self._taken.add(number)
        return number

    def copy_begins(self, number: int) -> None:
        """Record that a device copies from or into a taken buffer from now on."""
        self._require(number in self._taken and number not in self._copying, number)
        self._copying.add(number)

    def copy_ended(self, number: int) -> None:
        """Record that the device's copy of this buffer has ended."""
        self._require(number in self._copying, number)
        self._copying.remove(number)
        if number not in self._taken:
            self._free.append(number)

    def give_back(self, number: int) -> None:
        """Record that the owner no longer needs the buffer."""
        self._require(number in self._taken, number)
        self._taken.remove(number)
        if number not in self._copying:
            self._free.append(number)

    @staticmethod
    def _require(holds: bool, number: int) -> None:
        if not holds:
            raise RuntimeError(f"staging buffer {number} does not have the state that this call requires")


class StagingBuffer:
    """A taken buffer; ``bytes`` is its memory."""

    def __init__(self, number: int, memory: memoryview, pool: BufferPool) -> None:
        self.bytes = memory
        self.number = number
        self._pool = pool

    @contextmanager
    def copying(self, is_over: Callable[[], bool]) -> Generator[None]:
        """Mark the buffer as being copied while entered; after an error, until ``is_over`` returns True."""
        self._pool.copy_begins(self.number)
        try:
            yield
        except BaseException:
            self._pool.abandon(self.number, is_over)
            raise
        self._pool.copy_ended(self.number)

    def give_back(self) -> None:
        """Give the buffer back to the pool."""
        self._pool.give_back(self.number)


class BufferPool:
    """Buffers of equal size for one direction; callers get them in turn. Thread-safe.

    Sending and receiving have separate pools, and a chunk is requested only after its buffer is taken. So the holder of
    a buffer never waits for a thread that waits for a buffer.
    """

    def __init__(self, memories: Sequence[memoryview]) -> None:
        self._memories = memories
        self._ledger = BufferLedger(len(memories))
        self._abandoned: dict[int, Callable[[], bool]] = {}
        self._changed = threading.Condition()
        self.buffer_bytes = min(map(len, memories))

    @property
    def free(self) -> int:
        """Number of free buffers."""
        with self._changed:
            self._look_at_abandoned()
            return self._ledger.free

    def take(self) -> StagingBuffer:
        """Take the next free buffer; raise :class:`~tercet.protocol.TransferFailed` at a timeout."""
        with self._changed:
            found: int | None = None

            def taken() -> bool:
                nonlocal found
                self._look_at_abandoned()
                found = self._ledger.take()
                return found is not None

            if not self._changed.wait_for(taken, WAIT_SECONDS) or found is None:
                raise TransferFailed(f"no staging buffer became free within {WAIT_SECONDS:.0f} s")
            return StagingBuffer(found, self._memories[found], self)

    def take_at_once(self) -> StagingBuffer | None:
        """Take a free buffer and return it; None if all are taken now."""
        with self._changed:
            self._look_at_abandoned()
            found = self._ledger.take()
            return None if found is None else StagingBuffer(found, self._memories[found], self)

    def copy_begins(self, number: int) -> None:
        """Call :meth:`BufferLedger.copy_begins`."""
        with self._changed:
            self._ledger.copy_begins(number)

    def copy_ended(self, number: int) -> None:
        """Call :meth:`BufferLedger.copy_ended`, and wake waiting threads."""
        with self._changed:
            self._ledger.copy_ended(number)
            self._changed.notify_all()

    def abandon(self, number: int, is_over: Callable[[], bool]) -> None:
        """Stop waiting for a copy; the buffer is reused once ``is_over`` returns True."""
        with self._changed:
            self._abandoned[number] = is_over

    def give_back(self, number: int) -> None:
        """Call :meth:`BufferLedger.give_back`, and wake waiting threads."""
        with self._changed:
            self._ledger.give_back(number)
            self._changed.notify_all()

    def _look_at_abandoned(self) -> None:
        for number in [number for number, is_over in self._abandoned.items() if is_over()]:
            del self._abandoned[number]
            self._ledger.copy_ended(number)
