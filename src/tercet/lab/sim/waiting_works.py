"""Sequences of one engine that wait for admission, in the order in which they are admitted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tercet.lab.sim.sequence_work import Work


class WaitingWorks:
    """Two queues, as in vLLM: ``holding`` are sequences that have a lease's blocks, ``plain`` have none.

    Those that hold blocks come first. After a sequence that needs blocks, one that holds them would wait for ever.
    """

    __slots__ = ("_arrivals", "holding", "plain")

    def __init__(self) -> None:
        self.holding: deque[Work] = deque()
        self.plain: deque[Work] = deque()
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self.holding) + len(self.plain)

    def __iter__(self) -> Iterator[Work]:
        yield from self.holding
        yield from self.plain

    def __contains__(self, work: Work) -> bool:
        return work in self.plain or work in self.holding

    def arrival(self) -> int:
        """Number of an arrival now, among all arrivals."""
        self._arrivals += 1
        return self._arrivals

    def add(self, work: Work) -> None:
        """A sequence arrives."""
        work.arrival = self.arrival()
        self.queue_of(work).append(work)

    def put_back(self, work: Work) -> None:
        """Put a sequence without blocks before all others that have none."""
        self.plain.appendleft(work)

    def remove(self, work: Work) -> None:
        """Remove a waiting sequence."""
        self.queue_of(work).remove(work)

    def queue_of(self, work: Work) -> deque[Work]:
        """The queue that it waits in."""
        return self.holding if work.holding.blocks else self.plain

    def next_queue(self) -> deque[Work] | None:
        """The queue whose first sequence is next, None if none waits."""
        return self.holding or self.plain or None

    def clear(self) -> None:
        """Remove all."""
        self.holding.clear()
        self.plain.clear()
