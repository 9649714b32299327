"""The blocks of one engine's KV cache: who pins how many, and which of them can be found by their content.

A block is *pinned* (some holder counts on it), *cached* (found by its hash; pinned or not), or neither. Cached blocks
that nobody pins are taken back least recently used first, the tail of a sequence before its head. Blocks have no
identity beyond their hash: two holders that compute the same full block share it from then on, where vLLM would keep
a second copy until the first is freed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tercet.sim.reports import Observer


class Holding:
    """What one holder pins: ``hashes`` of its leading cached blocks in order, and ``plain`` blocks behind them."""

    __slots__ = ("hashes", "plain")

    def __init__(self) -> None:
        self.hashes: list[int] = []
        self.plain = 0

    @property
    def blocks(self) -> int:
        """All blocks held."""
        return len(self.hashes) + self.plain


class BlockPool:
    """``total`` blocks; ``evicted`` counts the cached ones that were taken back, ``observer`` hears of cached ones."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.evicted = 0
        self._pinned = 0
        self._cached: set[int] = set()
        # Cached blocks that nobody pins, the next one to go first; and those that several holders pin, with how many.
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._shared: dict[int, int] = {}
        self.observer: Observer | None = None

    def observe(self, observer: Observer) -> None:
        """Tell ``observer`` which blocks can be found by their hash, now and from now on."""
        self.observer = observer
        observer.cleared()
        observer.stored(list(self._cached))

    @property
    def free(self) -> int:
        """Blocks that can be taken now, cached but unpinned ones included."""
        return self.total - self._pinned

    @property
    def cached(self) -> int:
        """Blocks that can be found by their hash."""
        return len(self._cached)

    def match(self, hashes: Sequence[int], limit: int) -> int:
        """How many of the first ``limit`` hashes are cached, from the first on without a gap."""
        cached, found = self._cached, 0
        for key in hashes:
            if found >= limit or key not in cached:
                break
            found += 1
        return found

    def fits(self, hashes: Sequence[int], matched: int, plain: int) -> bool:
        """Whether ``matched`` cached blocks can be pinned and ``plain`` more taken."""
        if plain + matched <= self.free:
            return True
        unused = self._unused
        return plain + sum(key in unused for key in hashes[:matched]) <= self.free

    def pin(self, holding: Holding, hashes: Sequence[int], matched: int) -> None:
        """Pin the first ``matched`` of these cached blocks for a holder that has none yet."""
        holding.hashes = list(hashes[:matched])
        for key in holding.hashes:
            self._pinned += self._pin(key)

    def _pin(self, key: int) -> int:
        """Pin a cached block; returns how many more blocks are pinned now, one or none."""
        if key in self._unused:
            del self._unused[key]
            return 1
        self._shared[key] = self._shared.get(key, 1) + 1
        return 0

    def take(self, holding: Holding, count: int) -> None:
        """Add ``count`` plain blocks to a holder; the caller knows that they are free."""
        holding.plain += count
        self.take_plain(count)

    def take_plain(self, count: int) -> None:
        """Pin ``count`` plain blocks that the caller accounts for itself."""
        if count > self.free:
            raise AssertionError(f"{count} blocks were taken and {self.free} are free")
        self._pinned += count
        evicted = [self._unused.popitem(last=False)[0] for _ in range(self._pinned + len(self._unused) - self.total)]
        if evicted:
            self._cached.difference_update(evicted)
            self.evicted += len(evicted)
            if self.observer is not None:
                self.observer.dropped(evicted)

    def publish(self, holding: Holding, hashes: Sequence[int]) -> None:
        """Make the holder's plain blocks findable as ``hashes``, which continue what it has published already."""
        new = hashes[len(holding.hashes) : holding.blocks]
        holding.hashes.extend(new)
        holding.plain -= len(new)
        if not self._cached.isdisjoint(new):
            # Somebody else has these blocks: they are shared from now on, and the copies given back.
            for key in new:
                if key in self._cached:
                    self._pinned += self._pin(key) - 1
        self._cached.update(new)
        if new and self.observer is not None:
            self.observer.stored(new)

    def give_back(self, holding: Holding) -> None:
        """Unpin all that a holder has; what is published stays cached until its room is needed."""
        hashes, shared = holding.hashes, self._shared
        if not shared.keys().isdisjoint(hashes):
            hashes = [key for key in hashes if not self._unshare(key)]
        self._unused.update(dict.fromkeys(reversed(hashes)))
        self._pinned -= len(hashes) + holding.plain
        holding.hashes = []
        holding.plain = 0

    def _unshare(self, key: int) -> bool:
        """Take one holder off a block that others pin too; whether there are any."""
        holders = self._shared.get(key)
        if holders is None:
            return False
        if holders > 2:
            self._shared[key] = holders - 1
        else:
            del self._shared[key]
        return True

    def drop_plain(self, holding: Holding, count: int) -> None:
        """Give back ``count`` of a holder's plain blocks."""
        holding.plain -= count
        self._pinned -= count
