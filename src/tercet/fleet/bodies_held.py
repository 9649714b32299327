"""Request bodies that are kept for clients who have not come in yet: all of them together have a bound.

Each body may be as large as the largest that is taken, and a client may begin many and end none. When there are more
bytes than one process keeps, the largest body is let go, with 429: small requests pass, whoever else sends.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

from tercet.fleet.calls_in_flight import CallsInFlight, until_lost
from tercet.protocol import Saturated

LARGEST_AT_ONCE = 4
"""Of the largest bodies that are taken, so many are kept at once."""
RETRY_SECONDS = 10


class HeldBody:
    """The bytes of one body that are kept."""

    def __init__(self, bodies: BodiesHeld) -> None:
        self.size = 0
        self.calls = CallsInFlight()
        self._bodies = bodies
        self._refusal: Saturated | None = None

    def add(self, size: int) -> None:
        """So many more. Raises :class:`~tercet.protocol.Saturated` if this body is let go."""
        if self._refusal is None:
            self.size += size
            self._bodies.require_room(self, size)
        if self._refusal is not None:
            raise self._refusal

    @asynccontextmanager
    async def until_let_go(self) -> AsyncGenerator[None]:
        """What is awaited inside ends with :class:`~tercet.protocol.Saturated` once the body is let go."""
        if self._refusal is not None:
            raise self._refusal
        async with until_lost(self.calls):
            yield

    def forget(self) -> None:
        """Its bytes are not kept any more."""
        self._bodies.forget(self)

    def let_go(self, refusal: Saturated) -> None:
        """It is kept no longer."""
        self._refusal = refusal
        self.calls.lose(refusal)


class BodiesHeld:
    """All of them in one process, of at most ``most`` bytes together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._bodies: set[HeldBody] = set()
        self.size = 0

    def __len__(self) -> int:
        return len(self._bodies)

    @contextmanager
    def one(self) -> Generator[HeldBody]:
        """A body that is kept while entered; it costs nothing until it has bytes."""
        body = HeldBody(self)
        try:
            yield body
        finally:
            self.forget(body)

    def require_room(self, body: HeldBody, size: int) -> None:
        """``body`` has so many bytes more; the largest ones are let go for it, or it is."""
        self._bodies.add(body)
        self.size += size
        while self.size > self._most:
            largest = max(self._bodies, key=lambda each: each.size)
            self.forget(largest)
            largest.let_go(
                Saturated(
                    f"clients send more than {self._most} bytes of requests at once, which is all that is kept, and "
                    f"this is the largest one; try again in {RETRY_SECONDS} s",
                    retry_after=RETRY_SECONDS,
                )
            )

    def forget(self, body: HeldBody) -> None:
        """The bytes of ``body`` are not kept any more."""
        if body in self._bodies:
            self._bodies.discard(body)
            self.size -= body.size
