"""Limits for request bodies in a process: their total size, and the work to prepare them.

Buffered bodies are those of requests that are not admitted or passed on yet. A client may begin many bodies of the
largest accepted size and end none. When the buffered bodies of one process exceed their limit, the largest one is
dropped, with HTTP status 429, so that small requests of other clients still pass. Requests that run are not ended for
others: a request whose body would exceed the limit for theirs is refused, also with 429.

The work for a body before its first sequence runs (parsing, validation, templates, tokenization) grows with the body,
and most of it runs on the event loop. The long bodies of one client are prepared one after the other, in order; other
clients do not wait for them. Between the work for two bodies that are not short, of any clients, the loop does all
other work that is ready, such as sending tokens. Clients take turns there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from typing import Any

from tercet.fleet.admission import SOON, ClientLeft
from tercet.fleet.members import CallsInFlight, UntilLost
from tercet.protocol import Saturated
from tercet.settings import Limits
from tercet.wire.serving.server_access import BodyTurn

LARGEST_AT_ONCE = 4
"""Number of bodies of the largest accepted size that fit into the limit together."""
ADMITTED_BYTES = 1024**3
"""Most bytes of the bodies of admitted requests: 10,000 requests of 100 KB."""
RETRY_SECONDS = 10
PAGED_BYTES = 256 * 1024
"""Bytes above which a body is in its own pages."""
LONG_BYTES = 256 * 1024
"""Bytes from which on a body is long, regardless of its content: its text takes tens of milliseconds to tokenize."""
LONG_ITEMS = 256
"""Number of lists and objects from which on a shorter body is long, too; each takes about 20 us on the event loop."""
COMMAS_PER_ITEM = 16
SHORT_SHARE = 8
"""A body with less than this part of a long body's size, in each respect, is short: many of them take little time."""


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
        if self.size - self._written >= (PAGED_BYTES if self._pages is None else PAGED_BYTES // 4):
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
        # Pages go back to the system when they are closed, and can grow in place; memory of the heap need not.
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
        return UntilLost(self.calls)

    def forget(self) -> None:
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
        # Counted before it is checked: the body that exceeds the limit may be the largest itself.
        self.size += size
        while self.size > self._most:
            # The largest and not the newest: a client with one huge body must not make others' small ones fail.
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
        # Refused and not dropped: an admitted request may have sent tokens already.
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


# ---- turns -----------------------------------------------------------------------------------------------------------


def is_long(content: bytes) -> bool:
    """True if the work for a body takes long, so that the body has to wait for its turn."""
    return _has(content, LONG_BYTES, LONG_ITEMS)


def is_short(content: bytes) -> bool:
    """True if the work for a body takes so little time that many of them may be done at once."""
    return not _has(content, LONG_BYTES // SHORT_SHARE, LONG_ITEMS // SHORT_SHARE)


def _has(content: bytes, size: int, items: int) -> bool:
    if len(content) >= size or content.count(b",") >= items * COMMAS_PER_ITEM:
        return True
    return content.count(b"{") + content.count(b"[") >= items


class LongBodies:
    """The long bodies of one process, by client; ``count_refusal`` gets the reason of each refusal.

    In ``limits``, ``long_queued`` is how many bodies of one client may wait, and ``queue_timeout_s`` is their timeout.
    """

    def __init__(self, limits: Limits, count_refusal: Callable[[str], object]) -> None:
        self._limits = limits
        self._count_refusal = count_refusal
        # The waiting bodies of each client with a body in preparation.
        self._waiting: dict[str, deque[asyncio.Future[BodyTurn]]] = {}
        self._is_worked_on = False
        # The bodies of each client that wait to be worked on; the first client is the next one.
        self._next: dict[str, deque[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def turn(self, client: str, left: Callable[[], asyncio.Future[Any]]) -> BodyTurn:
        """Wait for the client's turn to have a long body prepared, and return the turn, which the caller ends.

        ``left`` is called only if the body has to wait; its future is done once the client closed the connection.
        Raises :class:`~tercet.protocol.Saturated` and :class:`~tercet.fleet.admission.ClientLeft`.
        """
        # One body of each client at a time. A client with many long bodies waits for himself, and not others for him.
        waiting = self._waiting.get(client)
        if waiting is None:
            return self._begin(client)
        if len(waiting) >= self._limits.long_queued:
            raise self._refusal(
                "long_queue_full",
                f"{len(waiting)} long requests of this client wait to be prepared, which is the limit "
                "(max-long-queued)",
            )
        mine: asyncio.Future[BodyTurn] = asyncio.get_running_loop().create_future()
        waiting.append(mine)
        gone = left()
        try:
            await asyncio.wait({mine, gone}, timeout=self._limits.queue_timeout_s, return_when="FIRST_COMPLETED")
        except asyncio.CancelledError:
            self._give_up(mine, waiting)
            raise
        if mine.done():
            return mine.result()
        self._give_up(mine, waiting)
        if gone.done():
            raise ClientLeft
        seconds = self._limits.queue_timeout_s
        raise self._refusal(
            "long_queue_timeout", f"after {seconds:g} s, earlier long requests of this client were not prepared yet"
        )

    async def alone(self, client: str) -> None:
        """Wait for an iteration of the event loop in which no other caller of this method returns.

        One caller of each client returns, then the next one of each.
        """
        if self._is_worked_on:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._next.setdefault(client, deque()).append(mine)
            await mine
            return
        self._work()

    def _begin(self, client: str) -> BodyTurn:
        self._waiting.setdefault(client, deque())
        return BodyTurn(lambda: self._pass_on(client))

    def _pass_on(self, client: str) -> None:
        waiting = self._waiting[client]
        if waiting:
            waiting.popleft().set_result(self._begin(client))
        else:
            del self._waiting[client]

    @staticmethod
    def _give_up(mine: asyncio.Future[BodyTurn], waiting: deque[asyncio.Future[BodyTurn]]) -> None:
        # The turn may have come in the same iteration in which the wait ended: then it is passed on, not lost.
        if mine.done():
            mine.result().end()
        else:
            waiting.remove(mine)

    def _refusal(self, reason: str, why: str) -> Saturated:
        self._count_refusal(reason)
        return Saturated(f"{why}; retry after {SOON} s", retry_after=SOON)

    def _work(self) -> None:
        """Let one caller work until its next await; callbacks that are scheduled already run after that."""
        # So the tokens of other requests get out between two long bodies, however many of them have arrived.
        self._is_worked_on = True
        asyncio.get_running_loop().call_soon(self._worked)

    def _worked(self) -> None:
        self._is_worked_on = False
        while self._next:
            # Round robin: a client with more bodies goes to the end of the line.
            client, waiting = next(iter(self._next.items()))
            following = waiting.popleft()
            del self._next[client]
            if waiting:
                self._next[client] = waiting
            if not following.done():
                following.set_result(None)
                self._work()
                return
