"""KV blocks of a simulated engine: free blocks, and the prefix cache with the holders of its blocks."""

from __future__ import annotations

import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import msgspec

from tercet.protocol import Content, EngineLoad, cache_key, content_of, packed
from tercet.protocol.content import chain, root_of
from tercet_lab.block_tokens import BlockTokens, Tokens, begin_alike, part_of

# Output tokens come from one fixed table, in order: a batch of them is a slice, which is made only when it is read.
_CYCLE = 8192
# The start in the table depends on the length of the prompt and on its last tokens.
_READ = 64
VOCABULARY = 32_000


def _table() -> tuple[int, ...]:
    state, tokens = 1, array("i")
    for _ in range(_CYCLE):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        tokens.append((state >> 33) % VOCABULARY)
    return tuple(tokens)


_TOKENS = _table() * 2


class Prompt:
    """A prompt's token ids with the output for them, under an adapter or without one."""

    __slots__ = ("_contents", "_start", "adapter", "cache_salt", "tokens")

    def __init__(self, tokens: Tokens | BlockTokens, cache_salt: str | None, adapter: str | None = None) -> None:
        self.tokens = tokens
        self.adapter = adapter
        self.cache_salt = cache_salt
        self._contents: dict[int, Content] | None = None
        self._start: int | None = None

    def output(self, begin: int, end: int) -> tuple[int, ...]:
        """Return the output tokens ``[begin, end)``, counted from the end of the prompt."""
        if self._start is None:
            weights = 0 if self.adapter is None else zlib.crc32(self.adapter.encode()) + 1
            self._start = hash((len(self.tokens), self.tokens[-_READ:])) + weights
        start = (self._start + begin) % _CYCLE
        if end - begin <= _CYCLE:
            return _TOKENS[start : start + end - begin]
        return tuple(_TOKENS[(start + i) % _CYCLE] for i in range(end - begin))

    def known(self, begin: int, end: int) -> Tokens | BlockTokens:
        """Return the tokens ``[begin, end)`` of the prompt followed by its output."""
        length = len(self.tokens)
        if end <= length:
            return part_of(self.tokens, begin, end)
        return self.tokens[begin:] + self.output(max(0, begin - length), end - length)

    def has_salt(self, cache_salt: str | None) -> bool:
        """True if the prompt has this cache salt. An empty salt equals None."""
        return (self.cache_salt or None) == (cache_salt or None)

    def begins_like(self, other: Prompt, end: int) -> bool:
        """True if this prompt and ``other`` have the same KV for their first ``end`` tokens."""
        alike = self.tokens is other.tokens or self.tokens[:end] == other.tokens[:end]
        return alike and self.has_salt(other.cache_salt) and self.adapter == other.adapter

    def content(self, end: int) -> Content:
        """Return the identity of the KV of the first ``end`` tokens, or of all tokens if the prompt is shorter."""
        known = self._contents = self._contents or {}
        if end not in known:
            known[end] = content_of(packed(self.tokens[:end]), cache_key(self.cache_salt, self.adapter or ""))
        return known[end]


class Run:
    """The first ``blocks`` blocks of ``tokens``; they follow the blocks of ``parent``.

    A root has no blocks, and its parent is ``ORIGIN``, which is its own parent. ``pins`` counts the holders of the run;
    each of them also holds all runs before it. ``children`` are the runs that follow, by the hashes of their first
    blocks; None for a leaf.
    """

    __slots__ = ("__weakref__", "blocks", "children", "names", "parent", "pins", "tokens")

    def __init__(self, parent: Run | None, tokens: Tokens | BlockTokens, blocks: int, pins: int = 0) -> None:
        self.parent = parent or self
        self.tokens = tokens
        self.blocks = blocks
        self.pins = pins
        self.children: dict[int, Run] | None = None
        self.names: list[int] | None = None


ORIGIN = Run(None, (), 0)


class Match(msgspec.Struct, frozen=True):
    """The cached part of a prompt: its first ``blocks`` blocks. The last ``part`` of them are the first of ``run``."""

    run: Run
    part: int
    blocks: int


class PrefixTree:
    """A tree of runs for each pair of cache salt and adapter: prompts of different pairs share no blocks.

    Clients choose salts, so a tree without blocks and holders is not kept.
    """

    __slots__ = ("_block_size", "_roots")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # A root's holders and its children refer to it.
        self._roots = WeakValueDictionary[tuple[str | None, str | None], Run]()

    def __iter__(self) -> Iterator[Run]:
        """Yield all runs, each after its parent."""
        left = list(self._roots.values())
        while left:
            run = left.pop()
            if run.blocks:
                yield run
            left += (run.children or {}).values()

    def root(self, salt: str | None, adapter: str | None = None) -> Run:
        """Return the root of all prompts with this cache salt and adapter."""
        found = self._roots.get((salt, adapter))
        if found is None:
            found = self._roots[salt, adapter] = Run(ORIGIN, (), 0)
            found.names = [root_of(salt, adapter)]
        return found

    def match(self, run: Run, blocks: int, prompt: Prompt, limit: int) -> Match:
        """Return how much of the first ``limit`` blocks of a prompt is cached.

        The first ``blocks`` blocks are known to be cached, and end with ``run``.
        """
        size, part = self._block_size, run.blocks
        while blocks < limit and part == run.blocks:
            begin, children = blocks * size, run.children
            child = children.get(hash(prompt.known(begin, begin + size)[:])) if children else None
            if child is None:
                break
            run = child
            part = self._alike(run, prompt.known(begin, min(limit, blocks + run.blocks) * size))
            blocks += part
        return Match(run, part, blocks)

    def _alike(self, run: Run, tokens: Tokens | BlockTokens) -> int:
        """Return the number of blocks that a run has in common with ``tokens``, counted from the start.

        ``tokens`` begin with the run's first block and are not longer than the run.
        """
        size, own = self._block_size, run.tokens
        alike, other = 1, len(tokens) // size + 1
        middle = other - 1  # in most cases all blocks are equal
        while alike < middle:
            if begin_alike(own, tokens, middle * size):
                alike = middle
            else:
                other = middle
            middle = (alike + other) // 2
        return alike

    def cut(self, match: Match) -> Run:
        """Return the run that ends where a match ends: the found run, or its first part, split off as a new run."""
        run, part = match.run, match.part
        if part == run.blocks:
            return run
        size = self._block_size
        tokens, end = run.tokens, part * size
        upper = Run(run.parent, part_of(tokens, 0, end), part, run.pins)
        # Holders of the run hold its second part from now on, and with it all runs before.
        run.tokens, run.blocks, run.parent = part_of(tokens, end, len(tokens)), run.blocks - part, upper
        self._put(upper)
        self._put(run)
        if run.names is not None:
            upper.names, run.names = run.names[:part], run.names[part:]
        return upper

    def add(self, parent: Run, tokens: Tokens | BlockTokens) -> Run:
        """Add a run of full blocks that are not cached yet, with one holder."""
        run = Run(parent, tokens, len(tokens) // self._block_size, pins=1)
        self._put(run)
        return run

    def _put(self, run: Run) -> None:
        """Add a run to the children of its parent."""
        if run.parent.children is None:
            run.parent.children = {}
        run.parent.children[hash(run.tokens[: self._block_size])] = run

    def shorten(self, run: Run, blocks: int) -> None:
        """Remove the last ``blocks`` blocks of a run without children."""
        run.blocks -= blocks
        if not run.blocks and run.parent.children:
            del run.parent.children[hash(run.tokens[: self._block_size])]

    def clear(self) -> None:
        """Remove all runs. Runs refer to parents and children; this ends the cycles of references."""
        left = list(self._roots.values())
        self._roots.clear()
        while left:
            run = left.pop()
            left += (run.children or {}).values()
            run.children = None

    def names(self, run: Run) -> list[int]:
        """Return the hashes of a run's blocks. Each covers all tokens before it, and the cache salt."""
        if run.names is None:
            before = run.parent.names or self.names(run.parent)
            run.names = chain(before[run.parent.blocks - 1], run.tokens, self._block_size)
        return run.names[: run.blocks]


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
