"""KV blocks of a simulated engine: free blocks, and the prefix cache with the holders of its blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import msgspec

from tercet.protocol import EngineLoad
from tercet_lab.sim.prefix_tree import Match, PrefixTree, Run
from tercet_lab.sim.prompts import Prompt


class SimObserver(Protocol):
    """An observer of one engine. A block's hash covers the block, all tokens before it and the cache salt."""

    def load(self, load: EngineLoad) -> None:
        """Receive the engine's present load."""

    def stored(self, hashes: Sequence[int]) -> None:
        """Record that these blocks are now in the engine's cache."""

    def dropped(self, hashes: Sequence[int]) -> None:
        """Record that these blocks are no longer in the engine's cache."""

    def cleared(self) -> None:
        """Record that the engine's cache is empty; blocks that remain are reported again with :meth:`stored`."""


class Holding(msgspec.Struct, eq=False):
    """The blocks that one holder pins: first ``cached`` blocks, which end in ``run``, then ``plain`` blocks.

    Cached blocks are part of the prefix cache; plain blocks are not.
    """

    run: Run | None = None
    cached: int = 0
    plain: int = 0

    @property
    def blocks(self) -> int:
        """Number of blocks that the holder pins."""
        return self.cached + self.plain


class BlockPool:
    """A pool of ``total`` KV blocks; ``free`` of them can be taken now, including cached blocks that are not pinned.

    ``evicted`` counts cached blocks that were reused. ``observer`` is notified of changes of the cache. Without
    ``caching``, no block is found again.
    """

    __slots__ = (
        "_block_size", "_caching", "_idle", "_idle_blocks", "_tree", "evicted", "free", "observer", "total",
    )  # fmt: skip

    def __init__(self, total: int, block_size: int, caching: bool = True) -> None:
        self.total = total
        self.free = total
        self.evicted = 0
        self.observer: SimObserver | None = None
        self._block_size = block_size
        self._caching = caching
        self._tree = PrefixTree(block_size)
        # Runs that are not pinned, in the order in which they were unpinned. (In a plain dict, finding the first key
        # takes time in proportion to the number of deleted keys before it.)
        self._idle = OrderedDict[Run, None]()
        self._idle_blocks = 0

    @property
    def cached(self) -> int:
        """Number of blocks that can be found again."""
        return sum(run.blocks for run in self._tree)

    def observe(self, observer: SimObserver) -> None:
        """Notify ``observer`` of the blocks that can be found, now and from now on."""
        self.observer = observer
        for run in self._tree:
            observer.stored(self._tree.names(run))

    def match(self, prompt: Prompt, limit: int) -> Match:
        """Return how much of the first ``limit`` blocks of a prompt, with its output, is cached."""
        return self._tree.match(
            self._tree.root(prompt.cache_salt, prompt.adapter), 0, prompt, limit if self._caching else 0
        )

    def fits(self, match: Match, plain: int) -> bool:
        """True if the blocks of a match can be pinned and ``plain`` more blocks can be taken."""
        if plain + match.blocks <= self.free:
            return True
        run, part = match.run, match.part
        while part and not run.pins:
            plain += part
            run = run.parent
            part = run.blocks
        return plain <= self.free

    def pin(self, holding: Holding, match: Match) -> None:
        """Pin the blocks of a match for a holder without blocks."""
        holding.run, holding.cached = self._tree.cut(match), match.blocks
        self._pin(holding.run)

    def _pin(self, run: Run, above: Run | None = None) -> None:
        """Count one more holder of a run and of all runs before it, up to ``above``, which is not counted."""
        while run.blocks and run is not above:
            if not run.pins:
                self._idle.pop(run, None)  # the first part of a run is not among them
                self._idle_blocks -= run.blocks
                self.free -= run.blocks
            run.pins += 1
            run = run.parent

    def take(self, holding: Holding, count: int) -> None:
        """Add ``count`` plain blocks to a holder. The caller has checked that they are free."""
        holding.plain += count
        self.take_plain(count)

    def take_plain(self, count: int) -> None:
        """Pin ``count`` plain blocks without a holder; the caller keeps the count."""
        if count > self.free:
            raise AssertionError(f"{count} blocks are needed, and {self.free} are free")
        self.free -= count
        if self._idle_blocks > self.free:
            self._evict(self._idle_blocks - self.free)

    def _evict(self, count: int) -> None:
        """Reuse ``count`` blocks that are not pinned.

        The run that was unpinned first loses blocks first, from its end.
        """
        self._idle_blocks -= count
        self.evicted += count
        while count:
            run = next(iter(self._idle))
            gone = min(count, run.blocks)
            if self.observer is not None:
                self.observer.dropped(self._tree.names(run)[: -gone - 1 : -1])
            self._tree.shorten(run, gone)
            if not run.blocks:
                del self._idle[run]
            count -= gone

    def publish(self, holding: Holding, prompt: Prompt, blocks: int) -> None:
        """Add the first ``blocks`` blocks of a prompt with its output to the prefix cache, if the holder has them."""
        begin, end = holding.cached, min(blocks, holding.blocks)
        if begin >= end or not self._caching:
            return
        run = holding.run or self._tree.root(prompt.cache_salt, prompt.adapter)
        match = self._tree.match(run, begin, prompt, end)
        if match.blocks > begin:
            # Another holder has these blocks: share them from now on, and give back the copies.
            above, run = run, self._tree.cut(match)
            self._pin(run, above)
            self.free += match.blocks - begin
        if match.blocks < end:
            size = self._block_size
            run = self._tree.add(run, prompt.known(match.blocks * size, end * size))
            if self.observer is not None:
                self.observer.stored(self._tree.names(run))
        holding.run, holding.cached = run, end
        holding.plain -= end - begin

    def give_back(self, holding: Holding) -> None:
        """Unpin all blocks of a holder. Published blocks stay cached until their space is needed."""
        run, self.free = holding.run, self.free + holding.plain
        while run is not None and run.blocks:
            run.pins -= 1
            if not run.pins:
                self._idle[run] = None
                self._idle_blocks += run.blocks
                self.free += run.blocks
            run = run.parent
        holding.run, holding.cached, holding.plain = None, 0, 0

    def close(self) -> None:
        """Empty the cache at the end of a simulation, so that no reference cycles remain for the garbage collector.

        Taking and giving back blocks still works: the last step may end later.
        """
        self._idle.clear()
        self._idle_blocks = 0
        self._tree.clear()

    def drop_plain(self, holding: Holding, count: int) -> None:
        """Free ``count`` of a holder's plain blocks."""
        holding.plain -= count
        self.free += count
