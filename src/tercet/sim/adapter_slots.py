"""LoRA adapters of a simulated engine: which ones its batch may use, and what it costs to put one there.

As in vLLM: a batch uses so many adapters at most. A sequence that asks for a further one waits, and others overtake it.
An adapter that nobody in the batch uses keeps its place until another one needs it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable

from tercet.protocol import AdapterLoad


class AdapterSlots:
    """``most`` places, each of which takes ``load_seconds`` to fill. Users are whatever tells two sequences apart."""

    def __init__(self, most: int, load_seconds: float) -> None:
        self.most = most
        self.loads = 0
        self._load_seconds = load_seconds
        self._filled: OrderedDict[str, None] = OrderedDict()  # the one used last is the last
        self._used: dict[Hashable, str] = {}
        self._users: Counter[str] = Counter()
        self._owed = 0.0

    def admits(self, adapter: str | None) -> bool:
        """Whether a sequence with this adapter may join the batch."""
        return adapter is None or adapter in self._users or len(self._users) < self.most

    def join(self, user: Hashable, adapter: str | None) -> None:
        """A sequence that is admitted joins the batch."""
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
        """A sequence is no more in the batch; one that was not there is fine."""
        adapter = self._used.pop(user, None)
        if adapter is not None:
            self._users[adapter] -= 1
            if not self._users[adapter]:
                del self._users[adapter]

    def owed(self) -> float:
        """The seconds that the next step takes longer, since adapters are put in their places first; once."""
        owed, self._owed = self._owed, 0.0
        return owed

    def load(self, waiting: Iterable[str | None]) -> AdapterLoad | None:
        """What the engine reports; ``waiting`` are the adapters of its queue. None if it serves none."""
        if not self.most:
            return None
        queued = tuple(sorted({adapter for adapter in waiting if adapter is not None}))
        return AdapterLoad(tuple(sorted(self._users)), queued, self.most)
