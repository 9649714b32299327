"""What the plugins of one decision share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

import numpy as np

from tercet.protocol import Request, Role
from tercet.scheduling.engine_columns import Floats, Integers
from tercet.scheduling.hashing import block_hashes


class PrefixIndex(Protocol):
    """Which engine holds which blocks."""

    def matched(self, hashes: Sequence[int]) -> Integers:
        """By row: how many of the first blocks the engine holds, without a gap."""
        ...


class RoutedPrefixes(PrefixIndex, Protocol):
    """An index that knows only what was routed where."""

    def note(self, row: int, hashes: Sequence[int]) -> None:
        """These blocks are on their way to the engine in ``row``."""
        ...


class Knowledge(Protocol):
    """What a fleet remembers beyond its engines' reports.

    It belongs to the fleet, not to plugins: a scheduling file that is loaded anew finds it as it was.
    """

    def routed(self, block_size: int, capacity: int) -> RoutedPrefixes:
        """The index of what was routed, in blocks of ``block_size`` tokens, at most ``capacity`` blocks per engine."""
        ...

    @property
    def stored(self) -> Mapping[int, PrefixIndex]:
        """The indexes of what engines say they hold, by the block size (tokens) that they use."""
        ...

    def cold_turns(self, rows: Integers, size: int) -> Floats:
        """When each engine last took a prompt that nobody had cached: larger is later, 0 is never.

        Only the ``size`` latest engines are remembered.
        """
        ...

    def note_cold(self, row: int) -> None:
        """The engine in ``row`` takes a prompt that nobody had cached."""
        ...


@dataclass
class Decision:
    """One pick: for whom, in which role, and what scorers found out on the way.

    ``matched`` are the tokens of the prompt that each engine (by row) is believed to hold; None while no scorer looked.
    """

    request: Request | None
    role: Role
    knowledge: Knowledge
    random: Random
    matched: Integers | None = None
    _hashes: dict[tuple[int, int | None], list[int]] = field(default_factory=dict[tuple[int, "int | None"], list[int]])

    def hashes(self, block_size: int, limit: int | None = None) -> list[int]:
        """The prompt's block hashes, computed once per decision; none without a request."""
        if self.request is None:
            return []
        key = block_size, limit
        if key not in self._hashes:
            self._hashes[key] = block_hashes(self.request, block_size, limit)
        return self._hashes[key]

    def note_match(self, tokens: Integers) -> None:
        """A scorer believes that engines hold so many tokens, by row; the largest belief counts."""
        self.matched = tokens if self.matched is None else np.maximum(self.matched, tokens)
