"""A prefix cache as a tree of runs. A run is a sequence of blocks that were added together.

A prompt that shares no prefix with another one is therefore found, pinned, unpinned and evicted as one object, at any
length. A run is split where a prompt continues differently. Tokens are compared directly; the names (hashes) of blocks
are computed only when they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakValueDictionary

import msgspec

from tercet.protocol.content import chain, root_of
from tercet_lab.sim.prompts import Prompt


class Run:
    """The first ``blocks`` blocks of ``tokens``; they follow the blocks of ``parent``.

    A root has no blocks, and its parent is ``ORIGIN``, which is its own parent. ``pins`` counts the holders of the run;
    each of them also holds all runs before it. ``children`` are the runs that follow, by the hashes of their first
    blocks; None for a leaf.
    """

    __slots__ = ("__weakref__", "blocks", "children", "names", "parent", "pins", "tokens")

    def __init__(self, parent: Run | None, tokens: tuple[int, ...], blocks: int, pins: int = 0) -> None:
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
            child = children.get(hash(prompt.known(begin, begin + size))) if children else None
            if child is None:
                break
            run = child
            part = self._alike(run, prompt.known(begin, min(limit, blocks + run.blocks) * size))
            blocks += part
        return Match(run, part, blocks)

    def _alike(self, run: Run, tokens: tuple[int, ...]) -> int:
        """Return the number of blocks that a run has in common with ``tokens``, counted from the start.

        ``tokens`` begin with the run's first block and are not longer than the run.
        """
        size, own = self._block_size, run.tokens
        alike, other = 1, len(tokens) // size + 1
        middle = other - 1  # in most cases all blocks are equal
        while alike < middle:
            if own[: middle * size] == tokens[: middle * size]:
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
        upper = Run(run.parent, run.tokens[: part * size], part, run.pins)
        # Holders of the run hold its second part from now on, and with it all runs before.
        run.tokens, run.blocks, run.parent = run.tokens[part * size :], run.blocks - part, upper
        self._put(upper)
        self._put(run)
        if run.names is not None:
            upper.names, run.names = run.names[:part], run.names[part:]
        return upper

    def add(self, parent: Run, tokens: tuple[int, ...]) -> Run:
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
