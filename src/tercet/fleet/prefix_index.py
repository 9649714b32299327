"""Which engine has which blocks: guessed from what was routed where, and told by the engines themselves.

Holders of a block are the bits of one integer, a bit per row: so the engines that have all of a prompt's first blocks
are found with one AND per block, however many engines there are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np

from tercet.protocol.block_hashes import Extras, chain, root_of
from tercet.scheduling.plugin import Integers

MANY = 24


class Holders:
    """For each block hash, the rows that have it: a :class:`~tercet.scheduling.plugin.PrefixIndex`.

    ``rows`` gives the number of rows.
    """

    def __init__(self, rows: Callable[[], int]) -> None:
        self._rows = rows
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, row: int, block: int) -> None:
        """``row`` has the block now."""
        self._holders[block] = self._holders.get(block, 0) | 1 << row

    def discard(self, row: int, block: int) -> None:
        """``row`` has it no more."""
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
    """The places of the ones."""
    if mask.bit_count() > MANY:
        octets = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), dtype=np.uint8)
        yield from np.flatnonzero(np.unpackbits(octets, bitorder="little")).tolist()
        return
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class RoutingHistory(Holders):
    """The blocks of prompts that were routed to each engine, the ``capacity`` most recent ones of each.

    Plugins see :class:`~tercet.scheduling.plugin.RoutedPrefixes`. Hashes are those of chains: who has a block has all
    before it, which were routed there with it and are dropped later. So of a long prompt few blocks are looked up.
    """

    def __init__(self, rows: Callable[[], int], capacity: int) -> None:
        super().__init__(rows)
        self._capacity = capacity
        # Not plain dicts: finding the first key of one that loses its first keys walks over all that were lost.
        self._recent: dict[int, OrderedDict[int, None]] = {}

    def note(self, row: int, hashes: Sequence[int]) -> None:
        recent = self._recent.setdefault(row, OrderedDict())
        known = bisect_left(range(len(hashes)), True, key=lambda place: hashes[place] not in recent)
        # From the last block to the first: a prompt loses its end before its beginning, as in the engine.
        for block in reversed(hashes[known:]):
            recent[block] = None
            self.add(row, block)
        deque(map(recent.move_to_end, reversed(hashes[:known])), maxlen=0)  # a loop without bytecode: they are many
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
        """How far the blocks from ``begin`` on are held by the same: looked for in strides that grow, then between."""
        end, stride = begin + 1, 1
        while end < len(hashes) and self._holding(hashes, end) == holding:
            begin, end, stride = end, end + stride, 2 * stride
        between = range(begin + 1, min(end, len(hashes)))
        return begin + 1 + bisect_left(between, True, key=lambda place: self._holding(hashes, place) != holding)

    def forget(self, row: int) -> None:
        """The engine in ``row`` is gone, or has lost its cache."""
        for block in self._recent.pop(row, ()):
            self.discard(row, block)


class StoredBlocks(Holders):
    """What engines say they hold, in blocks of one size: fed with their KV events.

    Engines name blocks by hashes of their own, which mean nothing elsewhere; the tokens that come with them are hashed
    again. Blocks whose parent was never announced cannot be placed: they are left out and counted in ``orphans``.
    """

    def __init__(self, rows: Callable[[], int], block_size: int) -> None:
        super().__init__(rows)
        self._block_size = block_size
        self._places: dict[int, dict[Hashable, int]] = {}
        self._copies: dict[tuple[int, int], int] = {}
        self.orphans = 0

    def store(
        self,
        row: int,
        names: Sequence[Hashable],
        parent: Hashable | None,
        tokens: Sequence[int],
        salt: str | None = None,
        adapter: str | None = None,
        extras: Extras | None = None,
    ) -> None:
        """The engine stored consecutive blocks, which it calls ``names``, after the one it calls ``parent``.

        ``tokens`` are theirs, ``extras`` say what images and the like are in them; ``salt`` and ``adapter`` are those
        of the request they came from.
        """
        places = self._places.setdefault(row, {})
        place = root_of(salt, adapter) if parent is None else places.get(parent)
        if place is None:
            self.orphans += len(names)
            return
        for name, block in zip(names, chain(place, tuple(tokens), self._block_size, extras=extras), strict=False):
            self._put(row, places, name, block)

    def hold(self, row: int, hashes: Sequence[int]) -> None:
        """The engine stored blocks that it calls by the hashes that are used here."""
        places = self._places.setdefault(row, {})
        for block in hashes:
            self._put(row, places, block, block)

    def _put(self, row: int, places: dict[Hashable, int], name: Hashable, place: int) -> None:
        if name not in places:
            places[name] = place
            self._copies[row, place] = self._copies.get((row, place), 0) + 1
            self.add(row, place)

    def remove(self, row: int, names: Sequence[Hashable]) -> None:
        """The engine dropped blocks; names that it never announced are ignored."""
        places = self._places.get(row, {})
        for name in names:
            place = places.pop(name, None)
            if place is None:
                continue
            # One block of tokens may be held under several names (with adapters, say).
            left = self._copies.pop((row, place)) - 1
            if left:
                self._copies[row, place] = left
            else:
                self.discard(row, place)

    def forget(self, row: int) -> None:
        """The engine dropped everything, or is gone."""
        self.remove(row, list(self._places.get(row, ())))
        self._places.pop(row, None)
