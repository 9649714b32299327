"""Pickers: choose one of several engines. Pure; ``turn`` counts the picks made so far among these candidates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol


class Candidate(Protocol):
    """What a picker may look at: the sequences that this front door runs on the engine now."""

    @property
    def in_flight(self) -> int:
        """Sequences under way."""
        ...


Picker = Callable[[Sequence[Candidate], int], int]


def round_robin(candidates: Sequence[Candidate], turn: int) -> int:
    """Index of the next candidate in turn."""
    return turn % len(candidates)


def least_loaded(candidates: Sequence[Candidate], turn: int) -> int:
    """Index of the candidate with the fewest sequences in flight; among equals, the next in turn."""
    loads = [candidate.in_flight for candidate in candidates]
    fewest = min(loads)
    equals = [index for index, load in enumerate(loads) if load == fewest]
    return equals[turn % len(equals)]


PICKERS: Mapping[str, Picker] = {"round_robin": round_robin, "least_loaded": least_loaded}
