"""The shutdown of a router: it refuses new requests, finishes running ones, and ends the rest with an error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager

from tercet.logs import SHUTTING_DOWN
from tercet.protocol import ShuttingDown, TercetError

# Seconds between two log lines about the requests that are left.
SAY_SECONDS = 5.0
# Seconds in which answers that are given up can send their errors to their clients.
FAREWELL_SECONDS = 2.0


class Shutdown:
    """The shutdown of this process; running requests may continue for ``timeout_s`` seconds.

    ``requests`` counts the requests in flight here; ``elsewhere`` returns the number of those in other processes of
    this router that shut down.
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
        """True if the router refuses new requests."""
        return self._begun.is_set()

    def begin(self) -> None:
        """Refuse new requests, and end when all requests have ended; a second call has no effect."""
        self._begun.set()

    def hurry(self) -> None:
        """End without waiting for running requests."""
        self._begun.set()
        self._hurried.set()

    def require_serving(self) -> None:
        """Raise :class:`~tercet.protocol.ShuttingDown`, with the number of requests left, after it has begun."""
        if self.has_begun:
            left = self.requests + self.elsewhere()
            raise ShuttingDown(f"this router is shutting down; requests left: {left}")

    @contextmanager
    def request(self) -> Generator[None]:
        """Count a request while entered; raise :class:`~tercet.protocol.ShuttingDown` after the shutdown has begun."""
        if self.has_begun:
            raise ShuttingDown("this router is shutting down and accepts no new requests")
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
        """Wait until the router may end: after :meth:`begin`, and soon after :meth:`hurry`.

        ``stop_waiting`` is called with the error for requests that are not admitted yet, ``give_up`` with the error for
        requests that still run after the timeout.
        """
        # 1. What waits is refused: it has begun nothing, and another router can serve it.
        # 2. What runs may end by itself, within the timeout.
        # 3. What is left then ends with an error, and gets a moment to send it.
        await self._begun.wait()
        stop_waiting(ShuttingDown("this router is shutting down, and the request had not begun"))
        now = asyncio.get_running_loop().time
        until = now() + self._timeout_s
        while self.requests and not self._hurried.is_set() and (seconds := until - now()) > 0:
            SHUTTING_DOWN.tell(requests=self.requests, reason=f"waiting for them for up to {seconds:.0f} s")
            await _first_of(min(seconds, SAY_SECONDS), self._idle, self._hurried)
        if self.requests:
            why = "was not waited for" if self._hurried.is_set() else f"did not end within {self._timeout_s:g} s"
            SHUTTING_DOWN.tell(requests=self.requests, reason="the remaining requests end with an error")
            give_up(ShuttingDown(f"this router is shutting down, and the request {why}"))
            await _first_of(FAREWELL_SECONDS, self._idle)


async def _first_of(seconds: float, *events: asyncio.Event) -> None:
    """Wait until one of the events is set, at most ``seconds``."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
