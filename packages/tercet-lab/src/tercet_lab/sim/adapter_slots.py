"""The adapter slots of a simulated engine: which adapters a batch may have, and what loading them takes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable

from tercet.protocol import AdapterLoad


class AdapterSlots:
    """``most`` adapter slots of a batch. Filling a slot takes ``load_seconds``.

    A user is any value that identifies a sequence.
    """

    def __init__(self, most: int, load_seconds: float) -> None:
        self.most = most
        self.loads = 0
        self._load_seconds = load_seconds
        self._filled: OrderedDict[str, None] = OrderedDict()  # the most recently used adapter is the last
        self._used: dict[Hashable, str] = {}
        self._users: Counter[str] = Counter()
        self._owed = 0.0

    def admits(self, adapter: str | None) -> bool:
        """True if a sequence with this adapter may join the batch."""
        return adapter is None or adapter in self._users or len(self._users) < self.most

    def join(self, user: Hashable, adapter: str | None) -> None:
        """Record that an admitted sequence joins the batch."""
        if adapter is None or user in self._used:
            return
        self._used[user] = adapter
        self._users[adapter] += 1
        if adapter not in self._filled:
            self.loads += 1
            self._owed += self._load_seconds
            while len(self._filled) >= self.most:
                del self._filled[next(each for each in self._filled if each not in self._users)]
        self._filled[adapter] = None
        self._filled.move_to_end(adapter)

    def leave(self, user: Hashable) -> None:
        """Record that a sequence left the batch. Ignore a sequence that was not in it."""
        adapter = self._used.pop(user, None)
        if adapter is not None:
            self._users[adapter] -= 1
            if not self._users[adapter]:
                del self._users[adapter]

    def owed(self) -> float:
        """Return the seconds that loading adapters adds to the next step, and set them to 0."""
        owed, self._owed = self._owed, 0.0
        return owed

    def load(self, waiting: Iterable[str | None]) -> AdapterLoad | None:
        """Return the engine's adapter report, or None if the engine serves no adapters.

        ``waiting`` are the adapters of the sequences in its queue.
        """
        if not self.most:
            return None
        queued = tuple(sorted({adapter for adapter in waiting if adapter is not None}))
        return AdapterLoad(tuple(sorted(self._users)), queued, self.most)
