"""A prefix cache as a tree of runs, each of which is a sequence of blocks that were added together.

So a prompt that shares nothing with any other is found, pinned, unpinned and evicted as one object, however long it is.
A run is split at the point where a prompt continues differently. Tokens are compared and not hashed: blocks have names
only if they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tercet.lab.sim.prompts import Prompt
from tercet.protocol.block_hashes import chain, root_of


class Run:
    """The first ``blocks`` blocks of ``tokens``, which follow those of ``parent``. A root has none, and is its parent.

    ``pins`` counts the holders of them, and of all blocks before. ``children`` follow it, by hashes of their first
    blocks; there are none while it is a leaf, as most are.
    """

    __slots__ = ("blocks", "children", "names", "parent", "pins", "tokens")

    def __init__(self, parent: Run | None, tokens: tuple[int, ...], blocks: int, pins: int = 0) -> None:
        self.parent = parent or self
        self.tokens = tokens
        self.blocks = blocks
        self.pins = pins
        self.children: dict[int, Run] | None = None
        self.names: list[int] | None = None


class Match(msgspec.Struct, frozen=True):
    """The first ``blocks`` blocks of a prompt are cached, of which the last ``part`` are the first ones of ``run``."""

    run: Run
    part: int
    blocks: int


class PrefixTree:
    """Runs by their parents. Prompts with different cache salts, or for different adapters, share nothing."""

    __slots__ = ("_block_size", "_roots")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: dict[tuple[str | None, str | None], Run] = {}

    def __iter__(self) -> Iterator[Run]:
        """Every run, each after its parents."""
        left = list(self._roots.values())
        while left:
            run = left.pop()
            if run.blocks:
                yield run
            left += (run.children or {}).values()

    def root(self, salt: str | None, adapter: str | None = None) -> Run:
        """The parent of prompts with this cache salt and adapter."""
        found = self._roots.get((salt, adapter))
        if found is None:
            found = self._roots[salt, adapter] = Run(None, (), 0)
            found.names = [root_of(salt, adapter)]
        return found

    def match(self, run: Run, blocks: int, prompt: Prompt, limit: int) -> Match:
        """How far the first ``limit`` blocks of a prompt are cached, given that ``blocks`` of them are, to ``run``."""
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
        """Number of blocks that a run has in common with tokens that begin with its first block and are not longer."""
        size, own = self._block_size, run.tokens
        alike, other = 1, len(tokens) // size + 1
        middle = other - 1  # mostly, all are the same
        while alike < middle:
            if own[: middle * size] == tokens[: middle * size]:
                alike = middle
            else:
                other = middle
            middle = (alike + other) // 2
        return alike

    def cut(self, match: Match) -> Run:
        """The run that ends where a match does: the one that was found, or a new one from its first part."""
        run, part = match.run, match.part
        if part == run.blocks:
            return run
        size = self._block_size
        upper = Run(run.parent, run.tokens[: part * size], part, run.pins)
        # Holders of the run keep holding its rest, and with it what is before.
        run.tokens, run.blocks, run.parent = run.tokens[part * size :], run.blocks - part, upper
        self._put(upper)
        self._put(run)
        if run.names is not None:
            upper.names, run.names = run.names[:part], run.names[part:]
        return upper

    def add(self, parent: Run, tokens: tuple[int, ...]) -> Run:
        """Add a run of full blocks that are not cached, with one holder."""
        run = Run(parent, tokens, len(tokens) // self._block_size, pins=1)
        self._put(run)
        return run

    def _put(self, run: Run) -> None:
        """Add it to its parent's children."""
        if run.parent.children is None:
            run.parent.children = {}
        run.parent.children[hash(run.tokens[: self._block_size])] = run

    def shorten(self, run: Run, blocks: int) -> None:
        """Remove the last ``blocks`` from a run that nothing follows."""
        run.blocks -= blocks
        if not run.blocks and run.parent.children:
            del run.parent.children[hash(run.tokens[: self._block_size])]

    def clear(self) -> None:
        """Forget everything. Runs refer to parents and children, and only this ends the cycles."""
        left = list(self._roots.values())
        self._roots.clear()
        while left:
            run = left.pop()
            left += (run.children or {}).values()
            run.children = None

    def names(self, run: Run) -> list[int]:
        """The hashes of a run's blocks; each covers everything before it, and the cache salt."""
        if run.names is None:
            before = run.parent.names or self.names(run.parent)
            run.names = chain(before[run.parent.blocks - 1], run.tokens, self._block_size)
        return run.names[: run.blocks]
