"""Which chunk lies in which staging buffer: a ledger without I/O, and the pool of threads' waiting around it.

A buffer is one owner's at a time. Its owner may be gone (a send that was cancelled, a connection that broke) while a
device still copies from it or into it: then it stays out of use until that copy is over, however late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from tercet.protocol import TransferFailed

# Longer than any transfer holds a buffer: each of its steps has a bound of its own.
WAIT_SECONDS = 60.0


class BufferLedger:
    """``count`` buffers by number. Decides only; not thread-safe."""

    def __init__(self, count: int) -> None:
        self._free = list(reversed(range(count)))
        self._taken: set[int] = set()
        self._copying: set[int] = set()

    @property
    def free(self) -> int:
        """How many can be taken."""
        return len(self._free)

    def take(self) -> int | None:
        """A buffer that nobody uses; ``None`` if there is none."""
        if not self._free:
            return None
        number = self._free.pop()
        self._taken.add(number)
        return number

    def copy_begins(self, number: int) -> None:
        """A device copies from a taken buffer, or into it, from now on."""
        self._require(number in self._taken and number not in self._copying, number)
        self._copying.add(number)

    def copy_ended(self, number: int) -> None:
        """It does not any more."""
        self._require(number in self._copying, number)
        self._copying.remove(number)
        if number not in self._taken:
            self._free.append(number)

    def give_back(self, number: int) -> None:
        """The owner is done with it, or gone."""
        self._require(number in self._taken, number)
        self._taken.remove(number)
        if number not in self._copying:
            self._free.append(number)

    @staticmethod
    def _require(holds: bool, number: int) -> None:
        if not holds:
            raise RuntimeError(f"staging buffer {number} is not in the state for this")


class StagingBuffer:
    """A taken buffer: ``bytes`` are its memory."""

    def __init__(self, number: int, memory: memoryview, pool: BufferPool) -> None:
        self.bytes = memory
        self.number = number
        self._pool = pool

    @contextmanager
    def copying(self, is_over: Callable[[], bool]) -> Generator[None]:
        """While entered, a device copies; if it is left by an error, whenever ``is_over`` says that it does not."""
        self._pool.copy_begins(self.number)
        try:
            yield
        except BaseException:
            self._pool.abandon(self.number, is_over)
            raise
        self._pool.copy_ended(self.number)

    def give_back(self) -> None:
        """The owner's last word."""
        self._pool.give_back(self.number)


class BufferPool:
    """Buffers of equal size for one direction; each waits for its turn. Thread-safe.

    Ways out and ways in have pools of their own, and who asks for a chunk has a buffer for it before. So whoever holds
    a buffer waits for nobody who waits for a buffer.
    """

    def __init__(self, memories: Sequence[memoryview]) -> None:
        self._memories = memories
        self._ledger = BufferLedger(len(memories))
        self._abandoned: dict[int, Callable[[], bool]] = {}
        self._changed = threading.Condition()
        self.buffer_bytes = min(map(len, memories))

    @property
    def free(self) -> int:
        """How many nobody uses."""
        with self._changed:
            self._look_at_abandoned()
            return self._ledger.free

    def take(self) -> StagingBuffer:
        """The next free one; raises :class:`~tercet.protocol.TransferFailed` if there is none for too long."""
        with self._changed:
            found: int | None = None

            def taken() -> bool:
                nonlocal found
                self._look_at_abandoned()
                found = self._ledger.take()
                return found is not None

            if not self._changed.wait_for(taken, WAIT_SECONDS) or found is None:
                raise TransferFailed(f"no staging buffer came free within {WAIT_SECONDS:.0f} s")
            return StagingBuffer(found, self._memories[found], self)

    def take_at_once(self) -> StagingBuffer | None:
        """A free one, if there is one now."""
        with self._changed:
            self._look_at_abandoned()
            found = self._ledger.take()
            return None if found is None else StagingBuffer(found, self._memories[found], self)

    def copy_begins(self, number: int) -> None:
        """See :meth:`BufferLedger.copy_begins`."""
        with self._changed:
            self._ledger.copy_begins(number)

    def copy_ended(self, number: int) -> None:
        """See :meth:`BufferLedger.copy_ended`."""
        with self._changed:
            self._ledger.copy_ended(number)
            self._changed.notify_all()

    def abandon(self, number: int, is_over: Callable[[], bool]) -> None:
        """Nobody waits for a copy any more; the buffer is of use once it is over."""
        with self._changed:
            self._abandoned[number] = is_over

    def give_back(self, number: int) -> None:
        """See :meth:`BufferLedger.give_back`."""
        with self._changed:
            self._ledger.give_back(number)
            self._changed.notify_all()

    def _look_at_abandoned(self) -> None:
        for number in [number for number, is_over in self._abandoned.items() if is_over()]:
            del self._abandoned[number]
            self._ledger.copy_ended(number)
