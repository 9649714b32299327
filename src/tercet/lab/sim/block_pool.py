"""KV blocks of a simulated engine: the free ones, and the prefix cache with the holders of its parts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import msgspec

from tercet.lab.sim.prefix_tree import Match, PrefixTree, Run
from tercet.lab.sim.prompts import Prompt
from tercet.protocol import EngineLoad


class SimObserver(Protocol):
    """Observes one engine. Blocks are named by hashes that cover everything before them and the cache salt."""

    def load(self, load: EngineLoad) -> None:
        """Its load now."""

    def stored(self, hashes: Sequence[int]) -> None:
        """These blocks are in its cache now."""

    def dropped(self, hashes: Sequence[int]) -> None:
        """These blocks are no longer in its cache."""

    def cleared(self) -> None:
        """Its cache is empty, or will be reported again."""


class Holding(msgspec.Struct, eq=False):
    """Blocks that one holder pins: ``cached`` ones, the last of them in ``run``, and after them ``plain`` ones."""

    run: Run | None = None
    cached: int = 0
    plain: int = 0

    @property
    def blocks(self) -> int:
        """All blocks held."""
        return self.cached + self.plain


class BlockPool:
    """``total`` blocks, of which ``free`` can be taken now, including cached ones that are not pinned.

    ``evicted`` counts cached blocks that were reused, ``observer`` is notified of cached ones. Without ``caching`` no
    block is found again.
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
        # Runs that are not pinned, in the order in which they were unpinned. (The first key of a plain dict that loses
        # its first keys is found by walking over all lost ones.)
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
        """How many of the first ``limit`` blocks of a prompt, with its output, are cached."""
        return self._tree.match(
            self._tree.root(prompt.cache_salt, prompt.adapter), 0, prompt, limit if self._caching else 0
        )

    def fits(self, match: Match, plain: int) -> bool:
        """Whether the blocks of a match can be pinned and ``plain`` more taken."""
        if plain + match.blocks <= self.free:
            return True
        run, part = match.run, match.part
        while part and not run.pins:
            plain += part
            run = run.parent
            part = run.blocks
        return plain <= self.free

    def pin(self, holding: Holding, match: Match) -> None:
        """Pin the blocks of a match for a holder that has none yet."""
        holding.run, holding.cached = self._tree.cut(match), match.blocks
        self._pin(holding.run)

    def _pin(self, run: Run, above: Run | None = None) -> None:
        """Count one more holder of a run and of all before it, as far as ``above``."""
        while run.blocks and run is not above:
            if not run.pins:
                self._idle.pop(run, None)  # the first part of a run is not among them
                self._idle_blocks -= run.blocks
                self.free -= run.blocks
            run.pins += 1
            run = run.parent

    def take(self, holding: Holding, count: int) -> None:
        """Add ``count`` plain blocks to a holder; the caller knows that they are free."""
        holding.plain += count
        self.take_plain(count)

    def take_plain(self, count: int) -> None:
        """Pin ``count`` plain blocks that the caller counts itself."""
        if count > self.free:
            raise AssertionError(f"{count} blocks were requested and {self.free} are free")
        self.free -= count
        if self._idle_blocks > self.free:
            self._evict(self._idle_blocks - self.free)

    def _evict(self, count: int) -> None:
        """Reuse ``count`` blocks that are not pinned: the first unpinned first, and of a run the last ones."""
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
        """Make the first ``blocks`` blocks of a prompt with its output available, as far as the holder has them."""
        begin, end = holding.cached, min(blocks, holding.blocks)
        if begin >= end or not self._caching:
            return
        run = holding.run or self._tree.root(prompt.cache_salt, prompt.adapter)
        match = self._tree.match(run, begin, prompt, end)
        if match.blocks > begin:
            # Another holder has these blocks: they are shared from now on, and the copies given back.
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
        """Unpin all blocks of a holder; published ones stay cached until they are needed."""
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
        """Forget the cache, at the end of a simulation: nothing is left for the garbage collector.

        A step that ends only then still takes and gives back blocks.
        """
        self._idle.clear()
        self._idle_blocks = 0
        self._tree.clear()

    def drop_plain(self, holding: Holding, count: int) -> None:
        """Give back ``count`` of a holder's plain blocks."""
        holding.plain -= count
        self.free += count
