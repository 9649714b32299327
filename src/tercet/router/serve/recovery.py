"""The decision whether and when a sequence is retried after a failed attempt; simulations of a router use it, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tercet.fleet import EngineFleet, Retry, RunningSequence
from tercet.protocol import EngineNotReached, EngineUnreachable, RoleUnavailable

POLL_INTERVAL_S = 0.1


class Recovery:
    """The retries of sequences of ``fleet`` after failures, and the wait before each retry.

    ``wait_for_engine`` is in seconds: while no engine answers, a sequence waits at most this time for one, and attempts
    in this time that no engine took do not count. ``clock`` is the clock of the attempts' times.
    """

    def __init__(self, fleet: EngineFleet, wait_for_engine: float, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._wait_for_engine = wait_for_engine
        self._clock = clock

    def next_attempt(self, sequence: RunningSequence, error: BaseException, tried_at: float) -> Retry | None:
        """Return the retry after an attempt that began at ``tried_at`` and failed with ``error``; None for no retry."""
        if isinstance(error, RoleUnavailable) and not sequence.answered:
            return None
        return sequence.next_attempt(self._clock(), self._was_taken(error, tried_at))

    async def wait(self, retry: Retry) -> None:
        """Wait for the pause of the retry, and then until an engine answers, at most ``wait_for_engine``.

        Without an engine the attempt would fail at once and use up the budget.
        """
        await asyncio.sleep(retry.pause)
        for _ in range(int(self._wait_for_engine / POLL_INTERVAL_S)):
            if self._fleet.health.answers:
                return
            await asyncio.sleep(POLL_INTERVAL_S)

    def _was_taken(self, error: BaseException, tried_at: float) -> bool:
        """True if an engine may have begun the attempt; an engine without progress since ``tried_at`` has not."""
        if isinstance(error, EngineUnreachable) and error.blames is not None:
            return self._fleet.liveness.progressed_since(error.blames, tried_at)
        return not isinstance(error, EngineNotReached)
