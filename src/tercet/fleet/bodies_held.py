"""A limit for the total size of request bodies that are buffered before their requests are admitted.

A client may begin many bodies of the largest accepted size and end none. When the bodies of one process exceed the
limit, the largest one is dropped, with HTTP status 429, so that small requests of other clients still pass.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from tercet.fleet.calls_in_flight import CallsInFlight, UntilLost, until_lost
from tercet.protocol import Saturated

LARGEST_AT_ONCE = 4
"""Number of bodies of the largest accepted size that fit into the limit together."""
RETRY_SECONDS = 10


class HeldBody:
    """The buffered bytes of one body."""

    def __init__(self, bodies: BodiesHeld) -> None:
        self.size = 0
        self.calls = CallsInFlight()
        self._bodies = bodies
        self._refusal: Saturated | None = None

    def add(self, size: int) -> None:
        """Add ``size`` bytes; raise :class:`~tercet.protocol.Saturated` if this body is dropped."""
        if self._refusal is None:
            self.size += size
            self._bodies.require_room(self, size)
        if self._refusal is not None:
            raise self._refusal

    def until_let_go(self) -> UntilLost:
        """Return a context inside which :class:`~tercet.protocol.Saturated` is raised when the body is dropped."""
        if self._refusal is not None:
            raise self._refusal
        return until_lost(self.calls)

    def forget(self) -> None:
        """Stop counting its bytes."""
        self._bodies.forget(self)

    def let_go(self, refusal: Saturated) -> None:
        """Drop the body: its reader gets ``refusal``."""
        self._refusal = refusal
        self.calls.lose(refusal)


class BodiesHeld:
    """All buffered bodies of one process, with at most ``most`` bytes in total."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._bodies: set[HeldBody] = set()
        self.size = 0

    def __len__(self) -> int:
        return len(self._bodies)

    @contextmanager
    def one(self) -> Generator[HeldBody]:
        """Register a body while entered; it counts once it has bytes."""
        body = HeldBody(self)
        try:
            yield body
        finally:
            self.forget(body)

    def require_room(self, body: HeldBody, size: int) -> None:
        """Count ``size`` more bytes of ``body``; above the limit, drop the largest bodies, maybe this one."""
        self._bodies.add(body)
        self.size += size
        while self.size > self._most:
            largest = max(self._bodies, key=lambda each: each.size)
            self.forget(largest)
            largest.let_go(
                Saturated(
                    f"clients send more than {self._most} bytes of requests at once, the limit of this process, and "
                    f"this request is the largest; retry after {RETRY_SECONDS} s",
                    retry_after=RETRY_SECONDS,
                )
            )

    def forget(self, body: HeldBody) -> None:
        """Stop counting the bytes of ``body``."""
        if body in self._bodies:
            self._bodies.discard(body)
            self.size -= body.size
