"""Limits for the total size of request bodies in a process: buffered ones, and those of admitted requests.

Buffered bodies are those of requests that are not admitted or passed on yet. A client may begin many bodies of the
largest accepted size and end none. When the buffered bodies of one process exceed their limit, the largest one is
dropped, with HTTP status 429, so that small requests of other clients still pass. Requests that run are not ended for
others: a request whose body would exceed the limit for theirs is refused, also with 429.

The pieces of a long body are copied into pages that go back to the system as soon as the body is dropped or taken. As
thousands of objects of 64 KiB they would leave holes between other objects, and the process would keep twice the limit.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap

from tercet.fleet.calls_in_flight import CallsInFlight, UntilLost, until_lost
from tercet.protocol import Saturated

LARGEST_AT_ONCE = 4
"""Number of bodies of the largest accepted size that fit into the limit together."""
ADMITTED_BYTES = 1024**3
"""Most bytes of the bodies of admitted requests: 10,000 requests of 100 KB."""
RETRY_SECONDS = 10
LONG_BYTES = 256 * 1024
"""Bytes above which a body is in its own pages."""


class HeldBody:
    """The buffered bytes of one body; ``size`` is their number, and ``content`` the whole body once it has arrived."""

    def __init__(self, bodies: BodiesHeld) -> None:
        self.size = 0
        self.content = b""
        self._pieces: list[bytes] = []
        self._pages: mmap | None = None
        self._written = 0
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

    def take(self, piece: bytes) -> None:
        """Keep one more piece of the body; raise :class:`~tercet.protocol.Saturated` if this body is dropped."""
        self.add(len(piece))
        self._pieces.append(piece)
        if self.size - self._written >= (LONG_BYTES if self._pages is None else LONG_BYTES // 4):
            self._to_pages()

    def end(self) -> None:
        """Make ``content`` of the pieces: the body has arrived. It counts until :meth:`forget`."""
        if self._pages is not None:
            self._to_pages()
            content = self._pages[: self._written]
        else:
            content = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._drop()
        self.content = content

    def _to_pages(self) -> None:
        """Move the pieces to the end of the pages."""
        end = self._written + sum(map(len, self._pieces))
        if self._pages is None:
            self._pages = mmap(-1, _whole_pages(2 * end), MAP_PRIVATE | MAP_ANONYMOUS)
        elif end > len(self._pages):
            self._pages.resize(_whole_pages(2 * end))
        for piece in self._pieces:
            self._pages[self._written : self._written + len(piece)] = piece
            self._written += len(piece)
        self._pieces.clear()

    def _drop(self) -> None:
        self.content = b""
        self._pieces.clear()
        if self._pages is not None:
            self._pages.close()
        self._pages, self._written = None, 0

    def until_let_go(self) -> UntilLost:
        """Return a context inside which :class:`~tercet.protocol.Saturated` is raised when the body is dropped."""
        if self._refusal is not None:
            raise self._refusal
        return until_lost(self.calls)

    def forget(self) -> None:
        """Drop the bytes, and stop counting them."""
        self._drop()
        self._bodies.forget(self)

    def let_go(self, refusal: Saturated) -> None:
        """Drop the body: its reader gets ``refusal``."""
        self._refusal = refusal
        self._drop()
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
            body.forget()

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


class AdmittedBodies:
    """The bodies of the requests that one process serves now, with at most ``most`` bytes in total."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.size = 0

    @contextmanager
    def one(self, size: int) -> Generator[None]:
        """Count a body of ``size`` bytes while entered; raise :class:`~tercet.protocol.Saturated` if it does not fit.

        A body fits if no other one is there.
        """
        if self.size and self.size + size > self._most:
            raise Saturated(
                f"the running requests of this process have bodies of {self.size} bytes, and this one of {size} bytes "
                f"would exceed the limit of {self._most}; retry after {RETRY_SECONDS} s",
                retry_after=RETRY_SECONDS,
            )
        self.size += size
        try:
            yield
        finally:
            self.size -= size


def _whole_pages(size: int) -> int:
    return -(-size // PAGESIZE) * PAGESIZE
