"""Indexes of KV blocks by engine, and the history of routed prompts; engines' events fill :mod:`.stored_blocks`.

The holders of a block are the bits of one integer, one bit per row: one AND per block finds the engines that have all
first blocks of a prompt, for any number of engines.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tercet.decisions.scheduling.plugin import Integers

MANY = 24


class Holders:
    """The rows that have each block, by hash: a :class:`~tercet.decisions.scheduling.plugin.PrefixIndex`.

    ``rows`` returns the number of rows.
    """

    def __init__(self, rows: Callable[[], int]) -> None:
        self._rows = rows
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, row: int, block: int) -> None:
        """Record that ``row`` has the block."""
        self._holders[block] = self._holders.get(block, 0) | 1 << row

    def discard(self, row: int, block: int) -> None:
        """Record that ``row`` no longer has the block."""
        left = self._holders.get(block, 0) & ~(1 << row)
        if left:
            self._holders[block] = left
        else:
            self._holders.pop(block, None)

    def matched(self, hashes: Sequence[int]) -> Integers:
        size = self._rows()
        matched = np.zeros(size, dtype=np.int64)
        holding, depth = -1, 0
        for depth, block in enumerate(hashes):
            still = holding & self._holders.get(block, 0)
            if still != holding:
                if depth:
                    matched[list(_bits(holding & ~still))] = depth
                holding = still
                if not holding:
                    return matched
        if holding > 0:
            matched[list(_bits(holding))] = depth + 1
        return matched


def _bits(mask: int) -> Iterator[int]:
    """Yield the positions of the bits that are set."""
    if mask.bit_count() > MANY:
        octets = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), dtype=np.uint8)
        yield from np.flatnonzero(np.unpackbits(octets, bitorder="little")).tolist()
        return
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class RoutingHistory(Holders):
    """The ``capacity`` most recent blocks of prompts that were routed to each engine.

    Plugins see :class:`~tercet.decisions.scheduling.plugin.RoutedPrefixes`. Hashes are chained: an engine with a block
    has all blocks before it, which were routed with it and are dropped later. So a lookup of a long prompt reads only
    a few blocks.
    """

    def __init__(self, rows: Callable[[], int], capacity: int) -> None:
        super().__init__(rows)
        self._capacity = capacity
        # Not plain dicts: finding the first key of a dict that lost its first keys walks over all lost ones.
        self._recent: dict[int, OrderedDict[int, None]] = {}

    def note(self, row: int, hashes: Sequence[int]) -> None:
        recent = self._recent.setdefault(row, OrderedDict())
        known = bisect_left(range(len(hashes)), True, key=lambda place: hashes[place] not in recent)
        # From the last block to the first: a prompt loses its end before its beginning, as in the engine.
        for block in reversed(hashes[known:]):
            recent[block] = None
            self.add(row, block)
        deque(map(recent.move_to_end, reversed(hashes[:known])), maxlen=0)  # many iterations: a loop without bytecode
        while len(recent) > self._capacity:
            self.discard(row, recent.popitem(last=False)[0])

    def matched(self, hashes: Sequence[int]) -> Integers:
        matched = np.zeros(self._rows(), dtype=np.int64)
        holding, depth = self._holding(hashes, 0), 0
        while holding:
            depth = self._end_of(holding, hashes, depth)
            still = self._holding(hashes, depth)
            lost = holding & ~still
            if lost & (lost - 1):
                matched[list(_bits(lost))] = depth
            else:  # one engine, as for most of a conversation's prompts
                matched[lost.bit_length() - 1] = depth
            holding = still
        return matched

    def _holding(self, hashes: Sequence[int], place: int) -> int:
        return self._holders.get(hashes[place], 0) if place < len(hashes) else 0

    def _end_of(self, holding: int, hashes: Sequence[int], begin: int) -> int:
        """Return the end of the blocks from ``begin`` on that have the same holders.

        The search goes in growing strides, and then between the last two.
        """
        end, stride = begin + 1, 1
        while end < len(hashes) and self._holding(hashes, end) == holding:
            begin, end, stride = end, end + stride, 2 * stride
        between = range(begin + 1, min(end, len(hashes)))
        return begin + 1 + bisect_left(between, True, key=lambda place: self._holding(hashes, place) != holding)

    def forget(self, row: int) -> None:
        """Drop all blocks of the engine in ``row``: it was removed or has lost its cache."""
        for block in self._recent.pop(row, ()):
            self.discard(row, block)
