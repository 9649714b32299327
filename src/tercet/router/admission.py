"""Who may come in, who waits, and who is sent away when the fleet has enough to do.

:class:`Admission` decides, a state machine without I/O; :class:`Gate` does what it decides.
A request waits while the fleet is *saturated*: while one of the limits is reached. Those that wait come in by priority
(lower first, as in vLLM), then in the order in which they came.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left, insort
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from tercet.fleet import EngineFleet
from tercet.fleet.membership import LOOK_SECONDS
from tercet.protocol import Saturated, TercetError
from tercet.router.metrics import Metrics
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
        insort(self.waiting, ticket, key=Ticket.rank)
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
            del self.waiting[bisect_left(self.waiting, ticket.rank(), key=Ticket.rank)]
        elif ticket.state == "in":
            self.in_flight -= 1
            self._note_end(now)
        ticket.state = "over"
        return self.look(load)

    def refuse_all(self) -> list[Ticket]:
        """Nobody waits any longer."""
        changed, self.waiting = self.waiting, []
        for ticket in changed:
            ticket.state = "refused"
        return changed

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


class ClientLeft(Exception):
    """The client closed its connection while it waited."""


class Gate:
    """Lets requests in, keeps them waiting, or refuses them, by ``limits`` and what ``fleet`` has to do."""

    def __init__(
        self, limits: Limits, fleet: EngineFleet, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._admission = Admission(limits)
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._woken: dict[Ticket, asyncio.Event] = {}
        self._closed_by: TercetError | None = None

    def close(self, error: TercetError) -> None:
        """What waits is refused with ``error``; nothing new is expected to come."""
        self._closed_by = error
        self._wake(self._admission.refuse_all())

    def require_engines(self) -> None:
        """Raises :class:`~tercet.protocol.EngineUnreachable` if no engine that may be picked answers."""
        self._fleet.require_answers()

    @property
    def is_open(self) -> bool:
        """Whether every request comes in at once: there is no limit."""
        return not self._admission.limits.any

    @asynccontextmanager
    async def place(self, priority: int, left: Callable[[], asyncio.Future[Any]]) -> AsyncGenerator[None]:
        """A request's place, held while entered.

        ``left``, called only if it has to wait, is done when its client has closed the connection. Raises
        :class:`~tercet.protocol.Saturated`, :class:`ClientLeft`, and the error of :meth:`close`.
        """
        ticket, changed = self._admission.arrive(priority, self._load())
        try:
            self._wake(changed)
            if ticket.state == "waiting":
                await self._wait(ticket, left())
            if ticket.state == "refused" and self._closed_by is not None:
                raise self._closed_by
            if ticket.state == "refused":
                raise self._refusal("queue_full", f"the queue of {self._admission.limits.queued} requests is full")
            self._tell()
            yield
        finally:
            self._woken.pop(ticket, None)
            self._wake(self._admission.leave(ticket, self._load(), self._clock()))
            self._tell()

    async def _wait(self, ticket: Ticket, left: asyncio.Future[Any]) -> None:
        """Until the ticket is in or refused. Raises when the client leaves or has waited for too long."""
        woken = self._woken[ticket] = asyncio.Event()
        self._tell()
        begun = self._clock()
        until = begun + self._admission.limits.queue_timeout_s
        waking = asyncio.ensure_future(woken.wait())
        try:
            while ticket.state == "waiting":
                seconds = until - self._clock()
                if seconds <= 0:
                    seconds = self._admission.limits.queue_timeout_s
                    raise self._refusal("queue_timeout", f"no place came free within {seconds:g} s")
                # Engines join and tokens go without telling the gate.
                await asyncio.wait({waking, left}, timeout=min(seconds, LOOK_SECONDS), return_when="FIRST_COMPLETED")
                if left.done() and ticket.state == "waiting":
                    self._metrics.refused.labels("client_left").inc()
                    raise ClientLeft
                self._wake(self._admission.look(self._load()))
        finally:
            waking.cancel()
            self._metrics.waited.observe(self._clock() - begun)

    def _refusal(self, reason: str, why: str) -> Saturated:
        self._metrics.refused.labels(reason).inc()
        after = self._admission.retry_after
        return Saturated(f"the fleet is saturated: {why}; try again in {after} s", retry_after=after)

    def _wake(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            if ticket in self._woken:
                self._woken[ticket].set()

    def _tell(self) -> None:
        self._metrics.admission(self._admission.in_flight, len(self._admission.waiting))

    def _load(self) -> FleetLoad:
        limits, members = self._admission.limits, self._fleet.members
        engines = tokens = 0
        if limits.in_flight_per_engine or limits.tokens_per_engine:
            able = [member for member in members if member.reachable and not member.leaving]
            engines = sum(member.role != "prefill" for member in able) or len(able)
        if limits.tokens or limits.tokens_per_engine:
            tokens = sum(member.in_flight_tokens for member in members)
        return FleetLoad(engines, tokens)
