"""Indexes of KV blocks by engine: the history of routed prompts, and the blocks that engines report in KV events.

The holders of a block are the bits of one integer, one bit per row: one AND per block finds the engines that have all
first blocks of a prompt, for any number of engines.

    prompt   block 0   block 1   block 2         rows 2 1 0
    holders    0b111     0b011     0b001         matched: row 0 three blocks, row 1 two, row 2 one

Cached tokens that a pick predicted are compared with those that the engine found: :class:`PrefixHits`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from tercet import logs
from tercet.decisions.scheduling.plugin import Integers
from tercet.protocol.content import Extras, chain, root_of

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
        self._holders[block] = self._holders.get(block, 0) | 1 << row

    def discard(self, row: int, block: int) -> None:
        left = self._holders.get(block, 0) & ~(1 << row)
        if left:
            self._holders[block] = left
        else:
            self._holders.pop(block, None)

    def matched(self, hashes: Sequence[int]) -> Integers:
        size = self._rows()
        matched = np.zeros(size, dtype=np.int64)
        holding, depth = -1, 0
        # Hashes are chained: an engine without a block has none of the later ones.
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
        # The row may be given to another engine at once.
        for block in self._recent.pop(row, ()):
            self.discard(row, block)


class _Unplaced(msgspec.Struct, frozen=True):
    """A block whose parent is not known yet; without ``tokens``, only its name is known."""

    parent: Hashable | None = None
    tokens: tuple[int, ...] = ()
    extra: tuple[int, ...] = ()


class _Held(msgspec.Struct):
    """The blocks of one engine, by name."""

    places: dict[Hashable, int] = {}  # the hash of each placed block
    unplaced: dict[Hashable, _Unplaced] = {}
    children: dict[Hashable, set[Hashable]] = {}  # the unplaced blocks that wait for each parent
    spare: dict[Hashable, int] = {}  # the number of copies after the first


class StoredBlocks(Holders):
    """The blocks of one size that engines hold, according to their KV events.

    Engines name blocks by their own hashes, which other processes cannot compute; the tokens in the events are hashed
    again. A name stands for the same tokens, and the same tokens before them, in all events.

    An engine may hold several copies of a block, and reports each copy as stored and removed: prompts match the block
    until the last copy is removed. A block whose parent is not known waits until the parent is stored: no prompt
    matches it earlier, as blocks before it are missing. ``orphans`` counts these blocks.
    """

    def __init__(self, rows: Callable[[], int], block_size: int) -> None:
        super().__init__(rows)
        self._block_size = block_size
        self._rows_held: dict[int, _Held] = {}
        # One block of tokens may be held under several names, for example with layers of several kinds.
        self._names: dict[tuple[int, int], int] = {}

    def __bool__(self) -> bool:
        return bool(self._rows_held)

    @property
    def orphans(self) -> int:
        """Number of blocks that no prompt matches, since the blocks before them are not known."""
        return sum(len(held.unplaced) for held in self._rows_held.values())

    def store(
        self, row: int, names: Sequence[Hashable], parent: Hashable | None, tokens: Sequence[int],
        salt: str | None = None, adapter: str | None = None, extras: Extras | None = None,
    ) -> None:  # fmt: skip
        """Record that an engine stored a copy of the consecutive blocks ``names``, after the block ``parent``.

        ``tokens`` are the tokens of these blocks, and ``extras`` describe images and other features in them; ``salt``
        and ``adapter`` are those of their request. If the number of tokens does not match the blocks, only the names
        are recorded.
        """
        if not names:
            return
        held = self._rows_held.setdefault(row, _Held())
        size, known = self._block_size, tuple(tokens)
        # Lower tiers report names without tokens; the tokens may be known from the event of the device.
        if len(known) != len(names) * size:
            for name in names:
                self._add_unplaced(held, name, _Unplaced())
            return
        place = root_of(salt, adapter) if parent is None else held.places.get(parent)
        if place is not None:
            for name, block in zip(names, chain(place, known, size, extras=extras), strict=True):
                if name in held.places or name in held.unplaced:
                    self._add_copy(held, name)
                if name in held.unplaced:
                    self._wait_no_more(held, name)
                if name not in held.places:
                    self._place(row, held, name, block)
            return
        for index, name in enumerate(names):
            block = known[index * size : (index + 1) * size]
            self._add_unplaced(held, name, _Unplaced(parent, block, (extras or {}).get(index, ())))
            parent = name

    def copy(self, row: int, other: StoredBlocks) -> None:
        """Begin with the blocks that ``other`` has of an engine, which has none here yet."""
        held = other._rows_held.get(row)
        if held is None:
            return
        children = {name: set(waiting) for name, waiting in held.children.items()}
        own = self._rows_held[row] = _Held({}, dict(held.unplaced), children, dict(held.spare))
        for name, place in held.places.items():
            self._find(row, own, name, place)

    def hold(self, row: int, hashes: Sequence[int]) -> None:
        """Record that the engine stored blocks whose names are Tercet's hashes; such blocks have one copy each."""
        held = self._rows_held.setdefault(row, _Held())
        for block in hashes:
            if block not in held.places:
                self._place(row, held, block, block)

    def _add_unplaced(self, held: _Held, name: Hashable, block: _Unplaced) -> None:
        """Add a copy of a block whose place is not known from this event."""
        known = held.unplaced.get(name)
        if known is not None or name in held.places:
            self._add_copy(held, name)
        if name in held.places or (known is not None and (known.tokens or not block.tokens)):
            return
        held.unplaced[name] = block
        if block.tokens:
            held.children.setdefault(block.parent, set()).add(name)

    @staticmethod
    def _add_copy(held: _Held, name: Hashable) -> None:
        held.spare[name] = held.spare.get(name, 0) + 1

    def _place(self, row: int, held: _Held, name: Hashable, place: int) -> None:
        """Place the block, so that prompts match it, and then the blocks that wait for it."""
        self._find(row, held, name, place)
        placed = [(name, place)] if held.children else []
        while placed:
            name, place = placed.pop()
            for child in held.children.pop(name, ()):
                block = held.unplaced.pop(child)
                (found,) = chain(place, block.tokens, self._block_size, extras={0: block.extra})
                self._find(row, held, child, found)
                placed.append((child, found))

    def _find(self, row: int, held: _Held, name: Hashable, place: int) -> None:
        # Even if another name has the place already: each name is removed by itself.
        held.places[name] = place
        self._names[row, place] = self._names.get((row, place), 0) + 1
        self.add(row, place)

    def _wait_no_more(self, held: _Held, name: Hashable) -> None:
        block = held.unplaced.pop(name)
        siblings = held.children.get(block.parent)
        if siblings is not None:
            siblings.discard(name)
            if not siblings:
                del held.children[block.parent]

    def remove(self, row: int, names: Sequence[Hashable]) -> None:
        """Record that the engine dropped a copy of these blocks; unknown names are ignored."""
        held = self._rows_held.get(row)
        if held is None:
            return
        for name in names:
            spare = held.spare.pop(name, 0)
            if spare > 1:
                held.spare[name] = spare - 1
            elif not spare:
                self._drop(row, held, name)
        # So that ``bool`` of the index says whether any engine reports blocks.
        if not held.places and not held.unplaced:
            del self._rows_held[row]

    def _drop(self, row: int, held: _Held, name: Hashable) -> None:
        """Drop the last copy of a block; later blocks keep their places, as the block may come back before they go."""
        if name in held.unplaced:
            self._wait_no_more(held, name)
        place = held.places.pop(name, None)
        if place is None:
            return
        left = self._names.pop((row, place)) - 1
        if left:
            self._names[row, place] = left
        else:
            self.discard(row, place)

    def forget(self, row: int) -> None:
        held = self._rows_held.pop(row, None)
        for place in () if held is None else held.places.values():
            if self._names.pop((row, place), None) is not None:
                self.discard(row, place)


NEAR = 64
"""Difference in tokens that is ignored: block sizes may differ, and engines compute a prompt's last block again."""
LEAST_PICKS = 16
KEPT = 1 - 1 / 64
"""Factor for an engine's history at each further pick: about the last 64 picks decide."""
DRIFTS, AGREES = 0.25, 0.125
"""Missing shares of the predicted tokens: a drift begins at the first share, and ends below the second."""


@dataclass
class _Hits:
    """Weighted sums of tokens of an engine's latest picks; ``picks`` is their number, up to :data:`LEAST_PICKS`."""

    picks: int = 0
    predicted: float = 0.0
    missing: float = 0.0
    drifts: bool = False

    @property
    def share(self) -> float:
        return self.missing / self.predicted if self.predicted else 0.0

    @property
    def reason(self) -> str:
        return f"{self.share:.0%} of the predicted tokens of its latest picks were missing"


class PrefixHits:
    """Predicted and found tokens of each engine; a drift is logged when it begins and when it ends.

    Only missing tokens count: more tokens than predicted cost nothing.
    """

    def __init__(self) -> None:
        self._engines: dict[str, _Hits] = {}

    def found(self, engine: str, predicted: int, cached: int) -> None:
        """Record that a pick predicted ``predicted`` tokens of a prompt in the engine's cache, which had ``cached``."""
        if not predicted:
            return
        hits = self._engines.setdefault(engine, _Hits())
        hits.picks = min(hits.picks + 1, LEAST_PICKS)
        short = predicted - cached
        hits.predicted = KEPT * hits.predicted + predicted
        hits.missing = KEPT * hits.missing + (short if short > NEAR else 0)
        if hits.drifts:
            if hits.share < AGREES:
                hits.drifts = False
                logs.PREFIX_AGREES.tell(engine=engine, reason=hits.reason)
        elif hits.picks == LEAST_PICKS and hits.share >= DRIFTS:
            hits.drifts = True
            logs.PREFIX_DRIFT.tell(engine=engine, reason=hits.reason)

    @property
    def drifting(self) -> list[str]:
        return [name for name, hits in self._engines.items() if hits.drifts]

    def forget(self, engine: str) -> None:
        self._engines.pop(engine, None)
