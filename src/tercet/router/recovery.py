"""What is tried next when an attempt at a sequence has failed, and when; also in simulations of a router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tercet.fleet import EngineFleet, Retry, RunningSequence
from tercet.protocol import EngineNotReached, EngineUnreachable, RoleUnavailable

POLL_INTERVAL_S = 0.1


class Recovery:
    """Whether a sequence of this fleet is tried again after a failure, and the wait before that.

    ``wait_for_engine`` is in seconds: while no engine answers, a sequence waits at most that long for one, and attempts
    in that time that no engine took do not count. ``clock`` is the one that times of attempts are told in.
    """

    def __init__(self, fleet: EngineFleet, wait_for_engine: float, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._wait_for_engine = wait_for_engine
        self._clock = clock

    def next_attempt(self, sequence: RunningSequence, error: BaseException, tried_at: float) -> Retry | None:
        """What follows the attempt that began at ``tried_at`` and failed with ``error``; None if nothing does."""
        if isinstance(error, RoleUnavailable) and not sequence.answered:
            return None
        return sequence.next_attempt(self._clock(), self._was_taken(error, tried_at))

    async def wait(self, retry: Retry) -> None:
        """Until it is time for the attempt, and an engine answers.

        Without any engine it would fail at once, and the budget with it; the watch says who is back.
        """
        await asyncio.sleep(retry.pause)
        for _ in range(int(self._wait_for_engine / POLL_INTERVAL_S)):
            if self._fleet.health.answers:
                return
            await asyncio.sleep(POLL_INTERVAL_S)

    def _was_taken(self, error: BaseException, tried_at: float) -> bool:
        """Whether an engine may have begun with the attempt that failed: not one that has stood still since before."""
        if isinstance(error, EngineUnreachable) and error.blames is not None:
            return self._fleet.liveness.progressed_since(error.blames, tried_at)
        return not isinstance(error, EngineNotReached)
