"""Counts of each program between two frames: requests, tokens, TTFT and TPOT."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tercet.fleet import RunningSequence, Trace
from tercet.router.page.lanes import in_ms
from tercet.router.page.records import ProgramPoint

MOST_PROGRAMS = 12
"""Number of programs with a separate line; clients may name any built-in program."""
OTHER = "other"
MOST_TIMES = 512
"""Largest number of times of one program between two frames that percentiles use: the first ones."""


class ProgramCount:
    """Counts of one program since the last frame."""

    def __init__(self) -> None:
        self.done = self.unfinished = self.tokens = 0
        self.ttfts: list[float] = []
        self.tpots: list[float] = []

    def point(self) -> ProgramPoint:
        """Return the counts in the form of a frame."""
        ttft, tpot = sorted(self.ttfts), sorted(self.tpots)
        return ProgramPoint(
            self.done, self.unfinished, self.tokens, percentile(ttft, 0.5), percentile(ttft, 0.9),
            percentile(tpot, 0.5), percentile(tpot, 0.9),
        )  # fmt: skip


class ProgramCounts:
    """Counts by program; ``running`` are the sequences at the start, whose earlier tokens are not counted."""

    def __init__(self, running: Iterable[RunningSequence]) -> None:
        self._tokens = {sequence: len(sequence.tokens) for sequence in running}
        self._counts: dict[str, ProgramCount] = {}
        self._names: set[str] = set()

    def ends(self, sequence: RunningSequence, trace: Trace) -> None:
        """Count a request that has ended."""
        count = self._of(trace.program)
        count.tokens += len(sequence.tokens) - self._tokens.pop(sequence, 0)
        if not sequence.ended:
            count.unfinished += 1
            return
        count.done += 1
        for times, value in ((count.ttfts, trace.ttft), (count.tpots, trace.tpot)):
            if value is not None and len(times) < MOST_TIMES:
                times.append(value)

    def take(self, running: Iterable[RunningSequence]) -> dict[str, ProgramPoint]:
        """Count the new tokens of the ``running`` sequences; return all counts since the last call."""
        before, grown = self._tokens, dict[str, int]()
        for sequence in running:  # there may be thousands
            tokens, name = len(sequence.tokens), sequence.program
            grown[name] = grown.get(name, 0) + tokens - before.get(sequence, 0)
            before[sequence] = tokens
        for name, tokens in grown.items():
            self._of(name).tokens += tokens
        counts, self._counts = self._counts, {}
        return {name: counts[name].point() for name in sorted(counts)}

    def _of(self, name: str) -> ProgramCount:
        if len(self._names) < MOST_PROGRAMS:
            self._names.add(name)
        name = name if name in self._names else OTHER
        found = self._counts.get(name)
        if found is None:
            found = self._counts[name] = ProgramCount()
        return found


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Return a percentile (nearest rank) of ascending seconds, in milliseconds; None without values."""
    return in_ms(ordered[min(len(ordered) - 1, int(share * len(ordered)))]) if ordered else None
