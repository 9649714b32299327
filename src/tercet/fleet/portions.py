"""The sequences of one request, which come in by portions: a request of many takes no more than its share.

A request has come in with one place of the :class:`~tercet.fleet.admission.Gate`. One of its sequences has that place
at a time, so that it always goes on; each further one that runs at once has a spare place of its own, which counts in
all limits, and which is taken only while nobody waits. The others wait here, in their order, and cost nobody anything.
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
    """Has spare places, such as a :class:`~tercet.fleet.admission.Gate`."""

    def spare(self, priority: int) -> Ticket | None:
        """One, if there is one that nobody waits for."""
        ...

    def give_back(self, ticket: Ticket) -> None:
        """It is free again."""
        ...


class Portions:
    """The sequences of one request, of which ``at_once`` run; ``spares`` is None where there are no limits."""

    def __init__(self, at_once: int, spares: Spares | None = None, priority: int = 0) -> None:
        self._at_once = at_once
        self._spares = spares
        self._priority = priority
        self._own_is_taken = False
        self.running = 0
        self.waiting: deque[asyncio.Future[Callable[[], None]]] = deque()

    @asynccontextmanager
    async def one(self) -> AsyncGenerator[None]:
        """While entered, one more sequence of the request runs; waits until it may."""
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
            elif not turn.cancelled():  # it was let in by the time it was cancelled
                turn.result()()
                self._let_in()
            raise

    def _let_in(self) -> None:
        while self.waiting:
            if self.waiting[0].done():  # it was cancelled, and is about to say so
                self.waiting.popleft()
            elif (give_back := self._take()) is not None:
                self.waiting.popleft().set_result(give_back)
            else:
                return

    def _take(self) -> Callable[[], None] | None:
        """A place, as what gives it back; None if there is none now. One of those that run will give one back."""
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
