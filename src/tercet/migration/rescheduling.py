"""Look by look, which moves should begin: what policies propose, once for each sequence, and not again too soon."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from tercet.migration.loaded_engines import LoadedEngine, Policy, Wanted

logger = logging.getLogger("tercet.router")
AGAIN_SECONDS = 2.0
"""A sequence is left alone for so long after a move of it has begun: what engines report is older than the move, and
what failed would fail again."""


class Rescheduling:
    """Decides without I/O. Times are seconds of one clock that never goes back."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self._policies = tuple(policies)
        self._not_before: dict[str, float] = {}
        self._failing: set[Policy] = set()

    def leaves_alone(self, seq_id: str) -> bool:
        """Whether a move of it has begun lately."""
        return seq_id in self._not_before

    def begins(self, now: float) -> None:
        """A look begins: what was left alone for long enough may be moved again."""
        self._not_before = {seq_id: at for seq_id, at in self._not_before.items() if at > now}

    def wanted(self, engines: Sequence[LoadedEngine]) -> Iterator[Wanted]:
        """What should be moved, each sequence at most once; ``engines`` have only such as may be."""
        seen: set[str] = set()
        for policy in self._policies:
            for wanted in self._proposals(policy, engines):
                if wanted.seq_id not in seen:
                    seen.add(wanted.seq_id)
                    yield wanted

    def moved(self, seq_id: str, now: float) -> None:
        """A move of it has begun."""
        self._not_before[seq_id] = now + AGAIN_SECONDS

    def _proposals(self, policy: Policy, engines: Sequence[LoadedEngine]) -> Iterator[Wanted]:
        """A user's policy may raise anything: then it proposes nothing, and the others go on."""
        try:
            for wanted in policy(engines):
                if not isinstance(wanted, Wanted):  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise TypeError(f"it proposes {wanted!r}, and not what tercet.migration.move() returns")
                yield wanted
        except Exception:
            if policy not in self._failing:
                logger.exception("moves: a policy failed, and proposes nothing while it does: %s", policy)
            self._failing.add(policy)
        else:
            self._failing.discard(policy)
