"""Who may come in, who waits, and who is sent away when the fleet has enough to do: a state machine without I/O.

A request waits while the fleet is *saturated*: while one of the limits is reached. Those that wait come in by priority
(lower first, as in vLLM), then in the order in which they came.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Literal

from tercet.settings import Limits

# What Retry-After is while nothing has finished yet, and its bounds, in seconds.
SOON, LATEST = 1, 60
# How much of the average gap between two ends is made of the last one.
NEWEST = 0.1


@dataclass(frozen=True)
class FleetLoad:
    """``engines`` that decode and can be picked, and the prompt ``tokens`` of what runs on all engines."""

    engines: int = 1
    tokens: int = 0


@dataclass(eq=False)
class Ticket:
    """One request; ``state`` goes from left to right."""

    priority: int
    number: int
    state: Literal["waiting", "in", "refused", "over"] = "waiting"

    @property
    def rank(self) -> tuple[int, int]:
        """The lower one comes in first."""
        return self.priority, self.number


@dataclass
class Admission:
    """The requests that are in, and those that wait. Methods return the tickets whose state they changed.

    ``now`` is in seconds of one clock.
    """

    limits: Limits
    in_flight: int = 0
    waiting: list[Ticket] = field(default_factory=list[Ticket])
    _number: int = 0
    _last_end: float | None = None
    _gap: float | None = None

    def arrive(self, priority: int, load: FleetLoad) -> tuple[Ticket, list[Ticket]]:
        """A request's ticket: in, waiting or refused; a full queue sends away whoever ranks last."""
        self._number += 1
        ticket = Ticket(priority, self._number)
        insort(self.waiting, ticket, key=_rank)
        changed = self.look(load)
        while len(self.waiting) > self.limits.queued:
            last = self.waiting.pop()
            last.state = "refused"
            changed.append(last)
        return ticket, changed

    def look(self, load: FleetLoad) -> list[Ticket]:
        """Let in whoever may, as the fleet is now."""
        changed: list[Ticket] = []
        while self.waiting and not self.saturated(load):
            ticket = self.waiting.pop(0)
            ticket.state = "in"
            self.in_flight += 1
            changed.append(ticket)
        return changed

    def leave(self, ticket: Ticket, load: FleetLoad, now: float) -> list[Ticket]:
        """A request ended, or does not wait any longer; one that was refused has nothing to give back."""
        if ticket.state == "waiting":
            del self.waiting[bisect_left(self.waiting, ticket.rank, key=_rank)]
        elif ticket.state == "in":
            self.in_flight -= 1
            self._note_end(now)
        ticket.state = "over"
        return self.look(load)

    def saturated(self, load: FleetLoad) -> bool:
        """Whether a request that came now would have to wait."""
        limits, engines = self.limits, max(1, load.engines)
        bounds = (
            (self.in_flight, limits.in_flight, 1),
            (self.in_flight, limits.in_flight_per_engine, engines),
            (load.tokens, limits.tokens, 1),
            (load.tokens, limits.tokens_per_engine, engines),
        )
        return any(limit is not None and used >= limit * times for used, limit, times in bounds)

    @property
    def retry_after(self) -> int:
        """Seconds until a request that came then would come in, if requests end as often as they did lately."""
        if self._gap is None:
            return SOON
        return min(LATEST, max(SOON, math.ceil(self._gap * (len(self.waiting) + 1))))

    def _note_end(self, now: float) -> None:
        if self._last_end is not None:
            gap = now - self._last_end
            self._gap = gap if self._gap is None else (1 - NEWEST) * self._gap + NEWEST * gap
        self._last_end = now


def _rank(ticket: Ticket) -> tuple[int, int]:
    return ticket.rank
