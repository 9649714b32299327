"""The sequences of one request, which run in portions, so that a request of many sequences takes only its share.

An admitted request has one slot of the :class:`~tercet.fleet.admission.Gate`. One of its sequences at a time uses this
slot, so that the request always makes progress. Each further sequence that runs at the same time has a spare slot,
which counts in all limits and is taken only while no other request waits. The remaining sequences wait here, in order,
and delay no other request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from tercet.fleet.admission import Ticket


class Spares(Protocol):
    """An object with spare slots, such as a :class:`~tercet.fleet.admission.Gate`."""

    def spare(self, priority: int) -> Ticket | None:
        """Take a spare slot if one is free and no request waits; return its ticket, or None."""
        ...

    def give_back(self, ticket: Ticket) -> None:
        """Free the slot of ``ticket``."""
        ...


class Portions:
    """The sequences of one request, of which at most ``at_once`` run at a time; ``spares`` is None without limits."""

    def __init__(self, at_once: int, spares: Spares | None = None, priority: int = 0) -> None:
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
