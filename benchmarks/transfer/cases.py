"""The cases to measure: each is an amount of data in chunks of one size. A round measures one way after the other."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from tercet.transport import KVRegion

KIB, MIB = 1024, 1024 * 1024
MAX_LAYERS = 8
BLOCK_TOKENS = 16


class Case(msgspec.Struct, frozen=True):
    """A transfer of ``total_bytes`` in chunks of ``chunk_bytes``. A chunk is one block of one layer."""

    chunk_bytes: int
    total_bytes: int

    @property
    def layers(self) -> int:
        """Number of layers of the region. Few chunks have few layers."""
        return max(1, min(MAX_LAYERS, self.total_bytes // self.chunk_bytes))

    @property
    def slots(self) -> int:
        """Number of blocks of each layer that are moved."""
        return max(1, self.total_bytes // self.chunk_bytes // self.layers)

    @property
    def moved_bytes(self) -> int:
        """Number of bytes that are moved: ``total_bytes``, rounded down to whole slots."""
        return self.slots * self.layers * self.chunk_bytes

    @property
    def num_blocks(self) -> int:
        """Number of blocks of each layer: twice the number of moved blocks, so that these are scattered."""
        return 2 * self.slots + 2

    def region(self) -> KVRegion:
        """Return a region for this case, with all pages in memory."""
        region = KVRegion.create(self.layers, self.num_blocks, self.chunk_bytes)
        for layer in range(self.layers):
            region.blocks(layer, 0, self.num_blocks)[:] = random.randbytes(self.chunk_bytes) * self.num_blocks
        return region

    def scattered(self, choose: random.Random) -> tuple[int, ...]:
        """Return random blocks to move, in random order."""
        return tuple(choose.sample(range(1, self.num_blocks), self.slots))


class Result(msgspec.Struct):
    """The times of a way in a case, in seconds, one for each round; or the reason ``error`` of a failure."""

    way: str
    case: Case
    seconds: list[float] = []
    error: str | None = None

    @property
    def gb_per_s(self) -> float | None:
        """Median rate in 10^9 bytes per second; None without times."""
        return self.case.moved_bytes / statistics.median(self.seconds) / 1e9 if self.seconds else None


@dataclass
class Table:
    """All results, by way and case. ``order`` is the order of the ways."""

    order: list[str] = field(default_factory=list[str])
    results: dict[tuple[str, Case], Result] = field(default_factory=dict[tuple[str, Case], Result])

    def add(self, way: str, case: Case, seconds: float) -> None:
        """Add the time of one round of a way, in seconds."""
        self.results.setdefault((way, case), Result(way, case, [])).seconds.append(seconds)

    def fail(self, way: str, case: Case, why: str) -> None:
        """Record the reason why a way cannot be measured."""
        self.results.setdefault((way, case), Result(way, case, [])).error = why

    def rate(self, way: str, case: Case) -> float | None:
        """Return the rate of a way in 10^9 bytes per second, or None if it was not measured."""
        found = self.results.get((way, case))
        return found.gb_per_s if found is not None else None

    @property
    def ways(self) -> list[str]:
        """All ways that were measured or failed, in order."""
        tried = {way for way, _ in self.results}
        return [way for way in self.order if way in tried]

    @property
    def cases(self) -> list[Case]:
        """All cases."""
        return list(dict.fromkeys(case for _, case in self.results))


def cases(chunks: Sequence[int], totals: Sequence[int]) -> list[Case]:
    """Return the cases of all totals and chunk sizes, without those whose chunk is larger than the total."""
    return [Case(chunk, total) for chunk in chunks for total in totals if total >= chunk]
