"""How many requests of batches may run, so that they fill what interactive traffic leaves: a state machine without I/O.

Additive increase and multiplicative decrease, as TCP's congestion control (Jacobson, SIGCOMM 1988): while an engine has
no queue, one more request of batches may run at each look; a request that waits at the router, a long queue on an
engine or little free KV halves the number. A batch has a day, an interactive request has a second, so the number falls
at once and grows slowly. Engines run these requests in the background (:mod:`tercet.decisions.background`), so those
that wait there delay no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tercet.protocol import EngineLoad

# Share of the KV cache in use from which on no more requests begin, and from which on some end: interactive requests
# must find blocks without a preemption.
FULL, OVERFULL = 0.8, 0.92
# Share of the allowed number that remains when a request waits.
DECREASE = 0.5
# Requests that wait on an engine: those with which it has enough to do, and those that could as well wait here.
ENOUGH, LONG_QUEUE = 2, 8
# Looks in a row with a long queue on an engine before the number falls, and with a request that waits at the router
# before requests of batches end for it.
QUEUED, PATIENCE = 2, 3


@dataclass
class Gaps:
    """The number of requests of batches that may run on a fleet.

    ``per_engine`` is the most of them for each engine that can decode. With ``most_step_s`` (the fleet's objective for
    the time per output token, in seconds) the number also falls while an engine's steps take longer.
    """

    per_engine: int
    most_step_s: float | None = None
    allowed: float = 1.0
    _queued: int = 0
    _pressed: int = 0

    def look(self, engines: Sequence[EngineLoad | None], is_waiting: bool, running: int) -> int:
        """Return how many requests may run now; fewer than ``running`` means that the newest of them must end.

        ``engines`` are the reports of the engines that can be picked, None for one that has not reported;
        ``is_waiting`` is true while a request waits at the router, and ``running`` is the most that ran since the last
        look: short requests may have ended. Call it at equal intervals.
        """
        known = [load for load in engines if load is not None]
        most = self.per_engine * len(known)
        usage = max((load.kv_usage for load in known), default=0.0)
        queued = any(load.waiting >= LONG_QUEUE for load in known)
        slow = self.most_step_s is not None and any((load.step_time or 0.0) > self.most_step_s for load in known)
        self._queued = self._queued + 1 if queued else 0
        self._pressed = self._pressed + 1 if is_waiting else 0
        if is_waiting or slow or usage >= FULL or self._queued >= QUEUED:
            self.allowed = max(1.0, min(self.allowed, running) * DECREASE)
            if self._pressed >= PATIENCE or usage >= OVERFULL:
                return min(most, int(running * DECREASE))
        elif not queued and any(load.waiting < ENOUGH for load in known):
            # Growth beyond what runs would be a reserve that no load has tested.
            self.allowed = min(self.allowed + 1, running + 1, most)
            return int(self.allowed)
        return min(most, running)
