"""What a fleet knows of its engines beyond membership: shared by all views, kept when programs and plugins change."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from tercet.fleet.load import STALE_AFTER, LoadTable
from tercet.fleet.prefixes import RoutingHistory, StoredBlocks
from tercet.protocol import Request
from tercet.scheduling.engines import Floats, Integers
from tercet.scheduling.hashing import block_hashes


class FleetKnowledge:
    """Reports, prefixes and turns of every engine, by its row.

    ``clock`` gives seconds that never go back; reports older than ``stale_after`` seconds count as unknown.
    """

    def __init__(self, clock: Callable[[], float], stale_after: float = STALE_AFTER) -> None:
        self.loads = LoadTable(clock, stale_after)
        self._routed: dict[tuple[int, int], RoutingHistory] = {}
        self._stored: dict[int, StoredBlocks] = {}
        self._cold: dict[int, int] = {}
        self._turn = 0
        self._begin: Callable[[], None] | None = None

    def hear_from(self, begin: Callable[[], None]) -> None:
        """Call ``begin`` when something is asked for the first time: from then on engines tell what they have to."""
        self._begin = begin

    def needed(self) -> None:
        """Something is asked."""
        begin, self._begin = self._begin, None
        if begin is not None:
            begin()

    def add(self, name: str) -> int:
        """The row of an engine that joins."""
        return self.loads.add(name)

    def remove(self, name: str) -> None:
        """An engine left: its row may be another's soon."""
        row = self.loads.remove(name)
        self._cold.pop(row, None)
        self._forget_cache(row)

    def rows(self, names: Sequence[str]) -> Integers:
        """The rows of engines that are here."""
        return np.array([self.loads.row(name) for name in names], dtype=np.int64)

    # ---- prefixes --------------------------------------------------------------------------------------------

    def routed(self, block_size: int, capacity: int) -> RoutingHistory:
        """See :class:`tercet.scheduling.Knowledge`; a history begins when it is asked for first."""
        history = self._routed.get((block_size, capacity))
        if history is None:
            history = self._routed[block_size, capacity] = RoutingHistory(lambda: self.loads.size, capacity)
        return history

    @property
    def stored(self) -> Mapping[int, StoredBlocks]:
        """See :class:`tercet.scheduling.Knowledge`."""
        return self._stored

    def store(
        self,
        name: str,
        block_size: int,
        blocks: Sequence[Hashable],
        parent: Hashable | None,
        tokens: Sequence[int],
        salt: str | None = None,
    ) -> None:
        """An engine's KV event: it holds these blocks now. See :meth:`StoredBlocks.store`."""
        row = self.loads.row(name)
        if row is not None:
            self._stored_in(block_size).store(row, blocks, parent, tokens, salt)

    def hold(self, name: str, block_size: int, hashes: Sequence[int]) -> None:
        """The same, from an engine that names blocks by our own hashes (:mod:`tercet.scheduling.hashing`)."""
        row = self.loads.row(name)
        if row is not None:
            self._stored_in(block_size).hold(row, hashes)

    def _stored_in(self, block_size: int) -> StoredBlocks:
        index = self._stored.get(block_size)
        if index is None:
            index = self._stored[block_size] = StoredBlocks(lambda: self.loads.size, block_size)
        return index

    def unstore(self, name: str, blocks: Sequence[Hashable]) -> None:
        """An engine's KV event: it dropped these blocks."""
        row = self.loads.row(name)
        if row is not None:
            for index in self._stored.values():
                index.remove(row, blocks)

    def cleared(self, name: str) -> None:
        """An engine's cache is empty: it said so, or it was started anew."""
        row = self.loads.row(name)
        if row is not None:
            self._forget_cache(row)

    def cached_tokens(self, name: str, request: Request) -> int:
        """How much of the prompt an engine is believed to hold now; 0 if nothing is known."""
        self.needed()
        row = self.loads.row(name)
        if row is None:
            return 0
        indexes = [*((size, index) for (size, _), index in self._routed.items()), *self._stored.items()]
        return max((size * int(index.matched(block_hashes(request, size))[row]) for size, index in indexes), default=0)

    def _forget_cache(self, row: int) -> None:
        for history in self._routed.values():
            history.forget(row)
        for index in self._stored.values():
            index.forget(row)

    # ---- turns with new prompts ------------------------------------------------------------------------------

    def cold_turns(self, rows: Integers, size: int) -> Floats:
        """See :class:`tercet.scheduling.Knowledge`."""
        # Kept in the order of turns: the last ones are the latest.
        known = list(self._cold.items())[-size:]
        turns = np.zeros(self.loads.size)
        if known:
            turns[[row for row, _ in known]] = [turn for _, turn in known]
        return turns[rows]

    def note_cold(self, row: int) -> None:
        """See :class:`tercet.scheduling.Knowledge`."""
        self._turn += 1
        self._cold.pop(row, None)
        self._cold[row] = self._turn
