"""How a router ends: it takes nothing new, finishes what runs, and tells what it cannot finish why it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager

from tercet.protocol import ShuttingDown, TercetError
from tercet.settings.log_events import SHUTTING_DOWN

# From one line about what is left to the next, in seconds.
SAY_SECONDS = 5.0
# In which answers that are given up get their errors to their clients, in seconds.
FAREWELL_SECONDS = 2.0


class Shutdown:
    """The end of this process's router; ``timeout_s`` is for how long running requests may go on then.

    ``requests`` counts those that are under way here, ``elsewhere`` those in other processes of this router, while
    they shut down.
    """

    def __init__(self, timeout_s: float) -> None:
        self.requests = 0
        self.elsewhere: Callable[[], int] = lambda: 0
        self._timeout_s = timeout_s
        self._begun = asyncio.Event()
        self._hurried = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def has_begun(self) -> bool:
        """Whether nothing new is taken."""
        return self._begun.is_set()

    def begin(self) -> None:
        """Take nothing new, and end when nothing runs any more. More than once changes nothing."""
        self._begun.set()

    def hurry(self) -> None:
        """End at once."""
        self._begun.set()
        self._hurried.set()

    def require_serving(self) -> None:
        """Raises :class:`~tercet.protocol.ShuttingDown` with the number of requests that are left, once it begins."""
        if self.has_begun:
            left = self.requests + self.elsewhere()
            raise ShuttingDown(f"this router is shutting down; requests left: {left}")

    @contextmanager
    def request(self) -> Generator[None]:
        """A request is under way while entered. Raises :class:`~tercet.protocol.ShuttingDown` once none is taken."""
        if self.has_begun:
            raise ShuttingDown("this router is shutting down, and takes no new requests")
        self.requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.requests -= 1
            if not self.requests:
                self._idle.set()

    async def run(
        self, stop_waiting: Callable[[TercetError], object], give_up: Callable[[TercetError], object]
    ) -> None:
        """Return once the router may end: a while after :meth:`begin`, soon after :meth:`hurry`.

        ``stop_waiting`` is called with the error of requests that have not been let in yet, ``give_up`` with that of
        those which still run when their time is over.
        """
        await self._begun.wait()
        stop_waiting(ShuttingDown("this router is shutting down, and the request had not begun yet"))
        await self._finish()
        if self.requests:
            why = "was not waited for" if self._hurried.is_set() else f"did not end within {self._timeout_s:g} s"
            SHUTTING_DOWN.tell(requests=self.requests, reason="what is left ends with an error")
            give_up(ShuttingDown(f"this router is shutting down, and the request {why}"))
            await _first_of(FAREWELL_SECONDS, self._idle)

    async def _finish(self) -> None:
        """Wait for running requests, and say from time to time how many are left."""
        now = asyncio.get_running_loop().time
        until = now() + self._timeout_s
        while self.requests and not self._hurried.is_set() and (seconds := until - now()) > 0:
            SHUTTING_DOWN.tell(requests=self.requests, reason=f"they are waited for, for up to {seconds:.0f} s")
            await _first_of(min(seconds, SAY_SECONDS), self._idle, self._hurried)


async def _first_of(seconds: float, *events: asyncio.Event) -> None:
    """Return once one of the events is set, or after ``seconds``."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
