"""The front door's gate: what :mod:`.admission` decides, done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tercet.fleet import EngineFleet
from tercet.protocol import Saturated
from tercet.router.admission import Admission, FleetLoad, Ticket
from tercet.router.metrics import Metrics
from tercet.settings import Limits

# Engines join and tokens go without telling the gate; those that wait look again so often.
LOOK_SECONDS = 0.5


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

    @asynccontextmanager
    async def place(self, priority: int, left: Callable[[], asyncio.Future[Any]]) -> AsyncGenerator[None]:
        """A request's place, held while entered.

        ``left``, called only if it has to wait, is done when its client has closed the connection. Raises
        :class:`~tercet.protocol.Saturated`, and :class:`ClientLeft`.
        """
        if not self._admission.limits.any:
            yield
            return
        ticket, changed = self._admission.arrive(priority, self._load())
        try:
            self._wake(changed)
            if ticket.state == "waiting":
                await self._wait(ticket, left())
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
                await asyncio.wait({waking, left}, timeout=min(seconds, LOOK_SECONDS), return_when="FIRST_COMPLETED")
                if left.done() and ticket.state == "waiting":
                    self._metrics.refused("client_left")
                    raise ClientLeft
                self._wake(self._admission.look(self._load()))
        finally:
            waking.cancel()
            self._metrics.queued_for(self._clock() - begun)

    def _refusal(self, reason: str, why: str) -> Saturated:
        self._metrics.refused(reason)
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
            able = [member for member in members if member.reachable and not member.draining]
            engines = sum(member.role != "prefill" for member in able) or len(able)
        if limits.tokens or limits.tokens_per_engine:
            tokens = sum(member.in_flight_tokens for member in members)
        return FleetLoad(engines, tokens)
