"""The order in which grammars are tried: a state machine without clocks, threads or processes.

Each grammar is compiled by a process with a limit of CPU time: first a short one, and, each time the limit ends the
process, later with the next longer one. So a usual grammar never waits for more than a few short tries of others, no
matter how many expensive ones arrive with it. Among grammars with the same limit, the one with the lowest price is
first (:mod:`tercet.protocol.grammar_bounds`), then the oldest. The longest tries never occupy the last free place.

A queue that is full gives up the grammar that would be tried last, so expensive ones cannot keep others out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum

LIMITS = (0.1, 1.0, 8.0)
"""CPU seconds of a grammar's first, second and third try."""
PLACES = 2
MOST_VERDICTS = 4096
MOST_WAITING = 256
"""Grammars that may wait: as many first tries take about 13 s."""


class TryOutcome(Enum):
    """What a try came to; ``LOST``: the process ended for a reason that has nothing to do with the grammar."""

    FINE = "fine"
    OVER_LIMIT = "over limit"
    REFUSED = "refused"
    LOST = "lost"


@dataclass(frozen=True)
class Try:
    """One try of the grammar ``key``, with ``limit`` CPU seconds; ``level`` counts the shorter tries before it."""

    key: Hashable
    level: int

    @property
    def limit(self) -> float:
        return LIMITS[self.level]


@dataclass
class _WaitingGrammar:
    price: float
    arrived: int
    level: int = 0
    losses: int = 0

    @property
    def order(self) -> tuple[int, float, int]:
        return self.level, self.price, self.arrived


@dataclass
class GrammarQueue:
    """Decide which grammar is tried next. ``places`` are the tries at a time."""

    places: int = PLACES
    _waiting: dict[Hashable, _WaitingGrammar] = field(default_factory=dict[Hashable, _WaitingGrammar])
    _running: dict[Hashable, tuple[Try, _WaitingGrammar]] = field(
        default_factory=dict[Hashable, tuple[Try, _WaitingGrammar]]
    )
    _verdicts: OrderedDict[Hashable, str] = field(default_factory=OrderedDict[Hashable, str])
    _arrived: int = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def verdict(self, key: Hashable) -> str | None:
        """Return why the grammar is refused, "" if it is known to be fine, None if it is not known."""
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
        return self._verdicts.get(key)

    def add(self, key: Hashable, price: float) -> Hashable | None:
        """Let a grammar wait for its tries, unless it does so already; return the one that is given up for it.

        None is given up while there is room. The new grammar itself is given up if it would be tried last.
        """
        if key in self._waiting or key in self._running:
            return None
        self._arrived += 1
        self._waiting[key] = _WaitingGrammar(price, self._arrived)
        if len(self._waiting) <= MOST_WAITING:
            return None
        last = max(self._waiting, key=lambda each: self._waiting[each].order)
        del self._waiting[last]
        return last

    def drop(self, key: Hashable) -> bool:
        """Forget a grammar that no request needs any more; return False if it is not waiting but tried now."""
        return self._waiting.pop(key, None) is not None

    def next_try(self) -> Try | None:
        """Return the next try, which begins now, or None if all places are taken or no grammar waits."""
        if len(self._running) >= self.places:
            return None
        last = len(LIMITS) - 1
        longest = sum(each.level == last for each, _ in self._running.values())
        may_be_long = longest < max(1, self.places - 1)
        able = [key for key, each in self._waiting.items() if each.level < last or may_be_long]
        if not able:
            return None
        key = min(able, key=lambda each: self._waiting[each].order)
        found = Try(key, self._waiting[key].level)
        self._running[key] = found, self._waiting.pop(key)
        return found

    def ended(self, tried: Try, outcome: TryOutcome, why: str = "") -> bool:
        """Record what a try came to. Return True if that is the grammar's end: its verdict is known, or it is lost.

        A grammar that was lost twice has no verdict: it may be fine, and a later request may try it again.
        """
        _, waiting = self._running.pop(tried.key)
        if outcome is TryOutcome.LOST:
            waiting.losses += 1
            if waiting.losses > 1:
                return True
            self._waiting[tried.key] = waiting
            return False
        if outcome is TryOutcome.OVER_LIMIT:
            if tried.level < len(LIMITS) - 1:
                waiting.level += 1
                self._waiting[tried.key] = waiting
                return False
            why = f"takes more than {tried.limit:g} s of CPU time to compile"
        self.decide(tried.key, "" if outcome is TryOutcome.FINE else why)
        return True

    def decide(self, key: Hashable, why: str) -> None:
        """Record a verdict: why the grammar is refused, or "" if it is fine. The oldest verdicts are forgotten."""
        self._verdicts[key] = why
        self._verdicts.move_to_end(key)
        while len(self._verdicts) > MOST_VERDICTS:
            self._verdicts.popitem(last=False)
