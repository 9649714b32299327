"""The sequences of one engine that wait for admission, in the order of admission."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tercet_lab.sim.sequence_work import Work


class WaitingWorks:
    """Two queues of waiting sequences: ``holding`` has those with a lease's blocks, ``plain`` has those without blocks.

    As in vLLM, sequences that hold blocks are admitted first. Behind a sequence that needs these blocks they would wait
    forever.
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
        """Return the number of an arrival now, in the order of all arrivals."""
        self._arrivals += 1
        return self._arrivals

    def add(self, work: Work) -> None:
        """Add a sequence that arrives now."""
        work.arrival = self.arrival()
        self.queue_of(work).append(work)

    def put_back(self, work: Work) -> None:
        """Put a sequence without blocks first among the sequences without blocks."""
        self.plain.appendleft(work)

    def remove(self, work: Work) -> None:
        """Remove a waiting sequence."""
        self.queue_of(work).remove(work)

    def queue_of(self, work: Work) -> deque[Work]:
        """Return the queue that a sequence waits in."""
        return self.holding if work.holding.blocks else self.plain

    def clear(self) -> None:
        """Remove all sequences."""
        self.holding.clear()
        self.plain.clear()
