"""Knowledge about engines beyond membership: all views share it, and it is kept when programs and plugins change.

Engines' reports are stored as columns, so that numpy compares a thousand engines at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tercet.decisions.scheduling.plugin import DEVICE, TIER_WEIGHTS, Floats, Integers, block_hashes, key_of
from tercet.fleet.prefix_index import RoutingHistory, StoredBlocks
from tercet.protocol import AdapterLoad, EngineLoad, Request
from tercet.protocol.content import Extras

STALE_AFTER = 1.0
"""Seconds after which a report counts as unknown: ten reports, one every 100 ms, are then missing."""
TIERS = tuple(TIER_WEIGHTS)
LOWER = tuple(tier for tier in TIERS if tier != DEVICE)
# What a router counts of its sequences on an engine, and which part of it runs in the background.
OF_BACKGROUND = {"in_flight": "background", "in_flight_tokens": "background_tokens"}
COUNTS = frozenset({*OF_BACKGROUND, *OF_BACKGROUND.values()})
COLUMNS = ("waiting", "running", "tokens", "kv_usage", "step_time")


class LoadTable:
    """The last report of each engine; every engine has a row from :meth:`add` to :meth:`remove`.

    Plugins see :class:`~tercet.decisions.scheduling.plugin.Reports`. ``clock`` is monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float], stale_after: float = STALE_AFTER) -> None:
        self._clock = clock
        self._stale_after = stale_after
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._at = np.empty(0)
        self._keys = np.empty(0, dtype=np.uint64)
        self._columns = {name: np.empty(0) for name in COLUMNS}
        self._last: dict[int, EngineLoad] = {}  # by row
        self._counts = {name: np.empty(0) for name in COUNTS}

    @property
    def size(self) -> int:
        """Number of rows, including unused ones: every row number is below this number."""
        return len(self._at)

    def add(self, name: str) -> int:
        """Add a row for an engine that has not reported yet, and return its number."""
        if not self._free:
            old = self.size
            new = max(8, 2 * old)
            for column in (self._at, self._keys, *self._columns.values(), *self._counts.values()):
                column.resize(new, refcheck=False)
            # By doubling: a fleet that grows engine by engine copies its columns a few times only.
            self._free = list(range(new - 1, old - 1, -1))  # the lowest row is taken first
        row = self._rows[name] = self._free.pop()
        # No report yet: as old as can be, so every age limit leaves it out.
        self._at[row] = -math.inf
        self._keys[row] = key_of(name)
        for column in self._counts.values():
            column[row] = 0
        return row

    def remove(self, name: str) -> int:
        # The row may be another engine's at once, so whatever is kept by row is forgotten with it.
        row = self._rows.pop(name)
        self._free.append(row)
        self._last.pop(row, None)
        return row

    def row(self, name: str) -> int | None:
        return self._rows.get(name)

    def report(self, name: str, load: EngineLoad) -> None:
        """Record a report that an engine sent now; a name without a row, such as a removed engine's, is ignored."""
        row = self._rows.get(name)
        if row is None:
            return
        self._at[row] = self._clock()
        self._last[row] = load
        for field, column in self._columns.items():
            value: float | None = getattr(load, field)
            column[row] = math.nan if value is None else value

    def count(self, name: str, what: str, number: int) -> None:
        """Set one of an engine's :data:`COUNTS`; a name without a row is ignored."""
        row = self._rows.get(name)
        if row is not None:
            self._counts[what][row] = number

    def last(self, name: str) -> tuple[EngineLoad, float] | None:
        """Return an engine's last report, of any age, and its age in seconds; None without a report."""
        row = self._rows.get(name)
        if row is None or row not in self._last:
            return None
        return self._last[row], self._clock() - float(self._at[row])

    def column(self, name: str, rows: Integers) -> Floats:
        age = self._clock() - self._at[rows]
        if name == "age":
            return np.where(np.isfinite(age), age, np.nan)
        return np.where(age <= self._stale_after, self._columns[name][rows], np.nan)

    def counted(self, name: str, rows: Integers, background: bool) -> Floats:
        found = self._counts[name][rows]
        return found if background else found - self._counts[OF_BACKGROUND[name]][rows]

    def adapters(self, rows: Integers) -> Sequence[AdapterLoad | None]:
        fresh = self._clock() - self._at[rows] <= self._stale_after
        pairs = zip(rows.tolist(), fresh, strict=True)
        return [self._last[row].adapters if is_fresh else None for row, is_fresh in pairs]

    def keys(self, rows: Integers) -> NDArray[np.uint64]:
        return self._keys[rows]


class FleetKnowledge:
    """Reports, cached prefixes and turns of every engine, by its row.

    Plugins see :class:`~tercet.decisions.scheduling.Knowledge`.
    ``clock`` is monotonic, in seconds; reports older than ``stale_after`` seconds count as unknown.
    """

    def __init__(self, clock: Callable[[], float], stale_after: float = STALE_AFTER) -> None:
        self.loads = LoadTable(clock, stale_after)
        self._routed: dict[tuple[int, int], RoutingHistory] = {}
        self.indexes: dict[int, StoredBlocks] = {}  # of blocks on engines' devices, by block size
        # By lower tier: the blocks on it or on a higher one, of the engines in ``_tiered``, which have reported one.
        self._down_to: dict[str, dict[int, StoredBlocks]] = {tier: {} for tier in LOWER}
        self._tiered: set[int] = set()
        self._cold: dict[int, int] = {}
        self._turn = 0
        self._begin: Callable[[], None] | None = None
        self._begin_blocks: Callable[[], None] | None = None

    def hear_from(self, begin: Callable[[], None], begin_blocks: Callable[[], None]) -> None:
        """Set the functions to call at the first use of knowledge (``begin``) and of stored blocks (``begin_blocks``).

        They make engines report their load, and the blocks that they store and drop.
        """
        self._begin, self._begin_blocks = begin, begin_blocks

    def start_reports(self) -> None:
        """Start engines' reports at the first call: a profile's pick, or a program that asks for cached tokens."""
        # Once: reports cost engines and this process, and go on from here.
        begin, self._begin = self._begin, None
        if begin is not None:
            begin()

    def start_kv_events(self) -> dict[int, StoredBlocks]:
        """Start engines' reports of their blocks at the first call, and return the ``indexes``."""
        self.start_reports()
        begin, self._begin_blocks = self._begin_blocks, None
        if begin is not None:
            begin()
        return self.indexes

    def add(self, name: str) -> int:
        return self.loads.add(name)

    def remove(self, name: str) -> None:
        row = self.loads.remove(name)
        self._cold.pop(row, None)
        self._forget_cache(row)

    def rows(self, names: Sequence[str]) -> Integers:
        return np.array([self.loads.row(name) for name in names], dtype=np.int64)

    # ---- prefixes --------------------------------------------------------------------------------------------

    def routed(self, block_size: int, capacity: int) -> RoutingHistory:
        """Return the history of routed prompts for this block size and capacity (blocks per engine).

        A history begins with its first use; see :class:`tercet.decisions.scheduling.Knowledge`.
        """
        history = self._routed.get((block_size, capacity))
        if history is None:
            history = self._routed[block_size, capacity] = RoutingHistory(lambda: self.loads.size, capacity)
        return history

    def store(
        self, name: str, block_size: int, blocks: Sequence[Hashable], parent: Hashable | None, tokens: Sequence[int],
        salt: str | None = None, adapter: str | None = None, extras: Extras | None = None, tier: str = DEVICE,
    ) -> None:  # fmt: skip
        """Record an engine's KV event: the engine holds these blocks on a ``tier`` now; see :meth:`StoredBlocks.store`.

        An event of a lower tier that has names only adds to what is known of blocks by those of the device.
        """
        row = self.loads.row(name)
        if row is None:
            return
        if tier == DEVICE:
            self._stored_in(self.indexes, block_size).store(row, blocks, parent, tokens, salt, adapter, extras)
        elif row not in self._tiered:
            self._tiered.add(row)
            for size, index in self.indexes.items():
                for sizes in self._down_to.values():
                    self._stored_in(sizes, size).copy(row, index)
        # A block on the device is also on each lower tier's index: these count blocks on a tier or on a higher one.
        for sizes in self._lower(row, tier):
            self._stored_in(sizes, block_size).store(row, blocks, parent, tokens, salt, adapter, extras)

    def hold(self, name: str, block_size: int, hashes: Sequence[int]) -> None:
        """Record blocks of an engine that names them by Tercet's hashes (:mod:`tercet.protocol.content`)."""
        row = self.loads.row(name)
        if row is not None:
            self._stored_in(self.indexes, block_size).hold(row, hashes)

    def _stored_in(self, indexes: dict[int, StoredBlocks], block_size: int) -> StoredBlocks:
        index = indexes.get(block_size)
        if index is None:
            index = indexes[block_size] = StoredBlocks(lambda: self.loads.size, block_size)
        return index

    def _lower(self, row: int, tier: str) -> Sequence[dict[int, StoredBlocks]]:
        """Return the lower tiers' indexes that have a block of this ``tier``; none for an engine without such tiers."""
        if row not in self._tiered:
            return ()
        return list(self._down_to.values())[max(0, TIERS.index(tier) - 1) :]

    def unstore(self, name: str, blocks: Sequence[Hashable], tier: str = DEVICE) -> None:
        """Record an engine's KV event: the engine dropped these blocks from a ``tier``."""
        row = self.loads.row(name)
        if row is not None:
            for indexes in (*([self.indexes] if tier == DEVICE else []), *self._lower(row, tier)):
                for index in indexes.values():
                    index.remove(row, blocks)

    @property
    def on_any_tier(self) -> Mapping[int, StoredBlocks]:
        """The blocks on any tier of the engines that have reported a lower one, by block size."""
        return self._down_to[LOWER[-1]]

    def matched_by_tier(self, block_size: int, hashes: Sequence[int]) -> Mapping[str, Integers]:
        device = self.start_kv_events()[block_size].matched(hashes)
        found, so_far = {DEVICE: device}, device
        for tier, indexes in self._down_to.items():
            index = indexes.get(block_size)
            if index is not None and index:
                reached = np.maximum(index.matched(hashes), so_far)
                found[tier], so_far = reached - so_far, reached
        return found

    def cleared(self, name: str) -> None:
        """Record that an engine's cache is empty, because the engine reported it or was restarted."""
        row = self.loads.row(name)
        if row is not None:
            self._forget_cache(row)

    def cached_tokens(self, name: str, request: Request) -> int:
        """Return the estimated number of the prompt's tokens in an engine's cache; 0 if nothing is known."""
        self.start_reports()
        row = self.loads.row(name)
        if row is None:
            return 0
        indexes = [*((size, index) for (size, _), index in self._routed.items()), *self.start_kv_events().items()]
        return max((size * int(index.matched(block_hashes(request, size))[row]) for size, index in indexes), default=0)

    def _forget_cache(self, row: int) -> None:
        for history in self._routed.values():
            history.forget(row)
        self._tiered.discard(row)
        # An index without any engine goes: matching costs a hash of the prompt for each block size.
        for indexes in (self.indexes, *self._down_to.values()):
            for size, index in list(indexes.items()):
                index.forget(row)
                if not index:
                    del indexes[size]

    # ---- turns with new prompts ------------------------------------------------------------------------------

    def cold_turns(self, rows: Integers, size: int) -> Floats:
        # In the order of turns: the last items are the latest turns.
        known = list(self._cold.items())[-size:]
        turns = np.zeros(self.loads.size)
        if known:
            turns[[row for row, _ in known]] = [turn for _, turn in known]
        return turns[rows]

    def note_cold(self, row: int) -> None:
        self._turn += 1
        self._cold.pop(row, None)  # so that it is the last one now: the order of the items is that of the turns
        self._cold[row] = self._turn
