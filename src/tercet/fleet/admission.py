"""Admission of requests: which are admitted, which wait, and which are refused when the fleet is at its limits.

:class:`Admission` decides, as a state machine without I/O; :class:`Gate` carries its decisions out. A request waits
while the fleet is *saturated*: while one of the limits is reached. Waiting requests are admitted by priority (lower
first, as in vLLM); within one priority flows take turns, and within one flow requests keep their order.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

from prometheus_client import Counter, Histogram

from tercet.fleet.engine_fleet import EngineFleet
from tercet.fleet.membership import POLL_INTERVAL_S
from tercet.protocol import Saturated, TercetError
from tercet.protocol.wire import MOST_PRIORITY
from tercet.settings import Limits

# Retry-After while no request has finished yet, and its largest value, in seconds.
SOON, LATEST = 1, 60
# Flows whose turns are remembered in addition to the waiting ones; clients choose the names of flows.
SPARE_FLOWS = 1000
# Priority of the requests of batches: behind those of every client, which may send any smaller number.
BEHIND_CLIENTS = MOST_PRIORITY + 1
# Weight of the latest gap between two ends in the moving average.
NEWEST = 0.1


@dataclass(frozen=True)
class FleetLoad:
    """The load of a fleet."""

    engines: int = 1  # that decode and can be picked
    tokens: int = 0  # of the prompts of all running sequences
    # Requests that may be in flight on engines, by the queue lengths that these report; None: queues are not used.
    room: int | None = None


@dataclass(eq=False)
class Ticket:
    """One request and its state of admission."""

    priority: int
    number: int
    turn: int = 0  # orders the flows of one priority: the lower turn goes first
    flow: str = ""
    for_engines: bool = True  # it needs room on engines; other requests count in ``in_flight`` only
    state: Literal["waiting", "in", "refused", "over"] = "waiting"  # then in or refused, in the end over

    def rank(self) -> tuple[int, int, int]:
        """Return the sort key of the queue: the ticket with the lowest rank is admitted first."""
        return self.priority, self.turn, self.number


@dataclass
class Admission:
    """The admitted and the waiting requests; its methods return the tickets whose state they changed.

    Arguments ``now`` are seconds of one clock.
    """

    limits: Limits
    in_flight: int = 0  # admitted requests, and those of them that engines serve
    on_engines: int = 0
    waiting: list[Ticket] = field(default_factory=list[Ticket])  # by rank
    _number: int = 0
    _others_waiting: int = 0  # requests that wait and are not for engines
    _turns: dict[int, int] = field(default_factory=dict[int, int])  # by priority, the turn that is served now
    _next_turns: dict[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])
    _last_end: float | None = None
    _gap: float | None = None  # moving average of the seconds between two ends

    def arrive(
        self, priority: int, load: FleetLoad, flow: str = "", for_engines: bool = True
    ) -> tuple[Ticket, list[Ticket]]:
        """Add a request; return its ticket (admitted, waiting or refused) and all tickets that changed.

        If the queue is too long, the waiting request of the highest rank is refused.
        """
        self._number += 1
        ticket = Ticket(priority, self._number, self._turn(priority, flow), flow, for_engines)
        # It joins the queue even if there is room: those that wait longer are admitted before it.
        insort(self.waiting, ticket, key=Ticket.rank)
        self._others_waiting += not for_engines
        changed = self.look(load)
        while len(self.waiting) > self.limits.queued:
            # The last one in the queue, which need not be the newest: a request of a higher priority takes its slot.
            last = self._no_longer_waiting(-1)
            last.state = "refused"
            changed.append(last)
        return ticket, changed

    def _turn(self, priority: int, flow: str) -> int:
        """Return the turn of a flow's next request, by start-time fair queueing.

        A new flow gets the turn that is served now, not an earlier one.
        """
        # Flows take turns, however many requests each has: the n-th request of a flow is in the n-th turn from now.
        turn = max(self._turns.get(priority, 0), self._next_turns.get((priority, flow), 0))
        self._next_turns[priority, flow] = turn + 1
        if len(self._next_turns) > len(self.waiting) + SPARE_FLOWS:
            # Turns of flows that do not wait are dropped: clients choose names, and they would grow without limit.
            kept = {(priority, flow), *((ticket.priority, ticket.flow) for ticket in self.waiting)}
            priorities = {of_flow for of_flow, _ in kept}
            self._next_turns = {key: at for key, at in self._next_turns.items() if key in kept}
            self._turns = {key: at for key, at in self._turns.items() if key in priorities}
        return turn

    def spare(self, priority: int, load: FleetLoad) -> Ticket | None:
        """Return one more slot for an admitted request at once; None if the fleet is full or other requests wait."""
        if self.waiting or self.saturated(load):
            return None
        self._number += 1
        ticket = Ticket(priority, self._number, state="in")
        self.in_flight += 1
        self.on_engines += 1
        return ticket

    def look(self, load: FleetLoad) -> list[Ticket]:
        """Admit the waiting requests that the present load allows."""
        changed: list[Ticket] = []
        at = 0
        while at < len(self.waiting) and not self._full:
            if self.waiting[at].for_engines and self.saturated(load):
                # Requests that are not for engines go past a fleet without room; without one, none can be admitted.
                if not self._others_waiting:
                    break
                at += 1  # it keeps its place among the requests for engines
                continue
            ticket = self._no_longer_waiting(at)
            ticket.state = "in"
            self.in_flight += 1
            self.on_engines += ticket.for_engines
            self._turns[ticket.priority] = ticket.turn
            changed.append(ticket)
        # Turns matter only among waiting flows: a flow that is alone starts afresh.
        if not self.waiting:
            self._turns.clear()
            self._next_turns.clear()
        return changed

    def leave(self, ticket: Ticket, load: FleetLoad, now: float) -> list[Ticket]:
        """End a request that ran or waited; a refused request has no slot to free."""
        if ticket.state == "waiting":
            self._no_longer_waiting(bisect_left(self.waiting, ticket.rank(), key=Ticket.rank))
        elif ticket.state == "in":
            self.in_flight -= 1
            self.on_engines -= ticket.for_engines
            # Only ends of admitted requests count: the gap between them is how fast slots become free.
            if self._last_end is not None:
                gap = now - self._last_end
                self._gap = gap if self._gap is None else (1 - NEWEST) * self._gap + NEWEST * gap
            self._last_end = now
        ticket.state = "over"
        return self.look(load)

    def refuse_all(self) -> list[Ticket]:
        changed, self.waiting, self._others_waiting = self.waiting, [], 0
        for ticket in changed:
            ticket.state = "refused"
        return changed

    def saturated(self, load: FleetLoad) -> bool:
        """True if a request for engines that arrived now would have to wait."""
        if self._full or (load.room is not None and self.on_engines >= load.room):
            return True
        limits, engines = self.limits, max(1, load.engines)
        bounds = (
            (self.on_engines, limits.in_flight_per_engine, engines),
            (load.tokens, limits.tokens, 1),
            (load.tokens, limits.tokens_per_engine, engines),
        )
        return any(limit is not None and used >= limit * times for used, limit, times in bounds)

    @property
    def _full(self) -> bool:
        """True if no further request is admitted, whether for engines or not."""
        return self.limits.in_flight is not None and self.in_flight >= self.limits.in_flight

    def _no_longer_waiting(self, at: int) -> Ticket:
        ticket = self.waiting.pop(at)
        self._others_waiting -= not ticket.for_engines
        return ticket

    @property
    def retry_after(self) -> int:
        """Seconds after which a retried request would be admitted, if requests end at the recent rate."""
        if self._gap is None:
            return SOON
        return min(LATEST, max(SOON, math.ceil(self._gap * (len(self.waiting) + 1))))


class ClientLeft(Exception):
    """Raised if the client closed its connection while its request waited."""


class GateMetrics(Protocol):
    """Metrics of a gate, in a router and in an endpoint picker."""

    refused: Counter  # requests, by reason
    waited: Histogram  # seconds that requests waited

    def admission(self, in_flight: int, queued: int) -> None: ...


class Gate:
    """The gate that admits, queues or refuses requests, by ``limits`` and the load of ``fleet``.

    ``room``, if given, returns how many requests may be in flight on engines, from the queue lengths that they report.
    """

    def __init__(
        self, limits: Limits, fleet: EngineFleet, metrics: GateMetrics, clock: Callable[[], float] = time.monotonic,
        room: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        self._admission = Admission(limits)
        self._room = room
        self.fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._woken: dict[Ticket, asyncio.Event] = {}
        self._closed_by: TercetError | None = None

    @property
    def limits(self) -> Limits:
        return self._admission.limits

    def count_refusal(self, reason: str) -> None:
        self._metrics.refused.labels(reason).inc()

    def close(self, error: TercetError) -> None:
        """Refuse all waiting requests with ``error``; the caller accepts no new ones."""
        self._closed_by = error
        self._wake(self._admission.refuse_all())

    def look(self) -> None:
        """Admit requests after a change that the gate was not notified of."""
        if self._admission.waiting:
            self._wake(self._admission.look(self._load()))

    @property
    def is_open(self) -> bool:
        """True if the gate has no limit, so that every request is admitted at once."""
        return not self._admission.limits.any and self._room is None

    @property
    def saturated(self) -> bool:
        """True if a request that arrived now would have to wait."""
        return bool(self._admission.waiting) or self._admission.saturated(self._load())

    @property
    def clients_wait(self) -> bool:
        """True while a request of a client waits here; requests of batches do not count."""
        return bool(self._admission.waiting) and self._admission.waiting[0].priority < BEHIND_CLIENTS

    @asynccontextmanager
    async def slot(
        self, priority: int, left: Callable[[], asyncio.Future[Any]], flow: str = "", for_engines: bool = True
    ) -> AsyncGenerator[None]:
        """Hold a slot for a request while entered; requests of the same ``flow`` share turns.

        A request that is not ``for_engines`` does not wait for room on engines.

        ``left`` is called only if the request has to wait; its future is done once the client closed its connection.
        Raises :class:`~tercet.protocol.Saturated`, :class:`ClientLeft`, and the error that :meth:`close` got.
        """
        ticket, changed = self._admission.arrive(priority, self._load(), flow, for_engines)
        try:
            self._wake(changed)
            if ticket.state == "waiting":
                await self._wait(ticket, left())
            # The gate was closed while it waited, so the reason is not a full queue.
            if ticket.state == "refused" and self._closed_by is not None:
                self._metrics.refused.labels(self._closed_by.code).inc()
                raise self._closed_by
            if ticket.state == "refused":
                raise self._refusal("queue_full", f"the queue of {self._admission.limits.queued} requests is full")
            self._measure()
            yield
        finally:
            self._woken.pop(ticket, None)
            # On every exit, also of a request that was never admitted: its slot, or its place in the queue, goes to the
            # next one.
            self._wake(self._admission.leave(ticket, self._load(), self._clock()))
            self._measure()

    def spare(self, priority: int) -> Ticket | None:
        """Return one more slot for an admitted request; None while others wait or the fleet is at its limits.

        The caller frees the slot with :meth:`give_back`.
        """
        ticket = self._admission.spare(priority, self._load())
        if ticket is not None:
            self._measure()
        return ticket

    def give_back(self, ticket: Ticket) -> None:
        self._wake(self._admission.leave(ticket, self._load(), self._clock()))
        self._measure()

    async def _wait(self, ticket: Ticket, left: asyncio.Future[Any]) -> None:
        """Wait until the ticket is admitted or refused; raise if the client leaves or the queue's timeout ends."""
        woken = self._woken[ticket] = asyncio.Event()
        self._measure()
        begun = self._clock()
        until = begun + self._admission.limits.queue_timeout_s
        waking = asyncio.ensure_future(woken.wait())
        try:
            while ticket.state == "waiting":
                seconds = until - self._clock()
                if seconds <= 0:
                    seconds = self._admission.limits.queue_timeout_s
                    raise self._refusal("queue_timeout", f"no slot was available within {seconds:g} s")
                # The gate is not notified when engines join or tokens are done, so it polls.
                await asyncio.wait({waking, left}, timeout=min(seconds, POLL_INTERVAL_S), return_when="FIRST_COMPLETED")
                if left.done() and ticket.state == "waiting":
                    self._metrics.refused.labels("client_left").inc()
                    raise ClientLeft
                self._wake(self._admission.look(self._load()))
        finally:
            waking.cancel()
            self._metrics.waited.observe(self._clock() - begun)

    def _refusal(self, reason: str, why: str) -> Saturated:
        self.count_refusal(reason)
        after = self._admission.retry_after
        error = Saturated(f"the fleet is saturated: {why}; retry after {after} s", retry_after=after)
        error.waited = reason == "queue_timeout"
        return error

    def _wake(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            if ticket in self._woken:
                self._woken[ticket].set()

    def _measure(self) -> None:
        self._metrics.admission(self._admission.in_flight, len(self._admission.waiting))

    def _load(self) -> FleetLoad:
        limits = self._admission.limits
        engines = tokens = 0
        if limits.in_flight_per_engine or limits.tokens_per_engine:
            able = [member for member in self.fleet.open if member.reachable]
            engines = sum(member.role != "prefill" for member in able) or len(able)
        if limits.tokens or limits.tokens_per_engine:
            tokens = sum(member.in_flight_tokens for member in self.fleet.members)
        return FleetLoad(engines, tokens, None if self._room is None else self._room())


class RequestConcurrency:
    """The sequences of one request, of which at most ``at_once`` run at a time; ``spares`` is None without limits.

    An admitted request has one slot of the :class:`Gate`. One of its sequences at a time uses this slot, so that the
    request always makes progress. Each further sequence that runs at the same time has a spare slot, which counts in
    all limits and is taken only while no other request waits. The remaining sequences wait here, in order, and delay
    no other request. So a request of many sequences takes only its share.
    """

    def __init__(self, at_once: int, spares: Gate | None = None, priority: int = 0) -> None:
        self._at_once = at_once
        self._spares = spares
        self._priority = priority
        self._own_is_taken = False
        self.running = 0
        self.waiting: deque[asyncio.Future[Callable[[], None]]] = deque()

    @asynccontextmanager
    async def one(self) -> AsyncGenerator[None]:
        """Wait until one more sequence of the request may run; it runs while the context is entered."""
        give_back = self._take() if not self.waiting else None
        if give_back is None:
            give_back = await self._turn()
        try:
            yield
        finally:
            give_back()
            self._let_in()

    async def _turn(self) -> Callable[[], None]:
        turn: asyncio.Future[Callable[[], None]] = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn in self.waiting:
                self.waiting.remove(turn)
            elif not turn.cancelled():  # the sequence got its turn before it was cancelled
                turn.result()()
                self._let_in()
            raise

    def _let_in(self) -> None:
        while self.waiting:
            if self.waiting[0].done():  # it was cancelled, and its task has not run since
                self.waiting.popleft()
            elif (give_back := self._take()) is not None:
                self.waiting.popleft().set_result(give_back)
            else:
                return

    def _take(self) -> Callable[[], None] | None:
        """Take a slot and return the function that frees it; None if no slot is free now."""
        if self.running >= self._at_once:
            return None
        ticket: Ticket | None = None
        is_own = not self._own_is_taken
        if is_own:
            self._own_is_taken = True
        elif self._spares is not None and (ticket := self._spares.spare(self._priority)) is None:
            return None
        self.running += 1
        return partial(self._give_back, is_own, ticket)

    def _give_back(self, is_own: bool, ticket: Ticket | None) -> None:
        self.running -= 1
        if is_own:
            self._own_is_taken = False
        elif ticket is not None and self._spares is not None:
            self._spares.give_back(ticket)
