"""Rounds of rescheduling: which proposals of the policies become moves, once per sequence and not too often."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from tercet.decisions.migration.loaded_engines import LoadedEngine, Policy, Wanted

logger = logging.getLogger("tercet.router")
RETRY_DELAY_S = 2.0
"""Time in seconds after the start of a move in which its sequence is not moved again.

Engines' reports are older than the move, and a failed move would fail again.
"""


class Rescheduling:
    """Decisions of the rounds, without I/O. Times are seconds of one monotonic clock."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self._policies = tuple(policies)
        self._not_before: dict[str, float] = {}
        self._failing: set[Policy] = set()

    def leaves_alone(self, seq_id: str) -> bool:
        """Return True if a move of the sequence began recently."""
        return seq_id in self._not_before

    def begins(self, now: float) -> None:
        """Begin a round: sequences whose pause has ended may be moved again."""
        self._not_before = {seq_id: at for seq_id, at in self._not_before.items() if at > now}

    def wanted(self, engines: Sequence[LoadedEngine]) -> Iterator[Wanted]:
        """Yield the moves to make, each sequence at most once, and only between engines that may exchange KV.

        ``engines`` have only sequences that may be moved.
        """
        seen, by_name = set[str](), {engine.name: engine for engine in engines}
        for policy in self._policies:
            for wanted in self._proposals(policy, engines):
                source, destination = by_name.get(wanted.source), by_name.get(wanted.destination)
                unfit = source is not None and destination is not None and not source.fits(destination)
                if not unfit and wanted.seq_id not in seen:
                    seen.add(wanted.seq_id)
                    yield wanted

    def moved(self, seq_id: str, now: float) -> None:
        """Record that a move of the sequence has begun."""
        self._not_before[seq_id] = now + RETRY_DELAY_S

    def _proposals(self, policy: Policy, engines: Sequence[LoadedEngine]) -> Iterator[Wanted]:
        """Yield a policy's proposals; if a user's policy raises an error, its proposals end and the others continue."""
        try:
            for wanted in policy(engines):
                if not isinstance(wanted, Wanted):  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise TypeError(f"it proposes {wanted!r}; yield results of tercet.decisions.migration.move()")
                yield wanted
        except Exception:
            if policy not in self._failing:
                logger.exception("moves: a policy failed and is ignored in this round: %s", policy)
            self._failing.add(policy)
        else:
            self._failing.discard(policy)
