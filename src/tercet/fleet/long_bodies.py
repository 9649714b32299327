"""Preparation of long request bodies: one body per client, and one at a time on the event loop.

The work for a body before its first sequence runs (parsing, validation, templates, tokenization) grows with the body,
and most of it runs on the event loop. The long bodies of one client are prepared one after the other, in order; other
clients do not wait for them. Between the work for two bodies that are not short, of any clients, the loop does all
other work that is ready, such as sending tokens. Clients take turns there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from tercet.fleet.admission import SOON, ClientLeft
from tercet.protocol import Saturated
from tercet.settings import Limits

LONG_BYTES = 256 * 1024
"""Bytes from which on a body is long, regardless of its content: its text takes tens of milliseconds to tokenize."""
LONG_ITEMS = 256
"""Number of lists and objects from which on a shorter body is long, too; each takes about 20 us on the event loop."""
COMMAS_PER_ITEM = 16
SHORT_SHARE = 8
"""A body with less than this part of a long body's size, in each respect, is short: many of them take little time."""


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


class BodyTurn:
    """The preparation of one client's long body, until :meth:`end`."""

    def __init__(self, over: Callable[[], None]) -> None:
        self._over: Callable[[], None] | None = over

    @property
    def has_ended(self) -> bool:
        """True if the turn has ended, so that the client's next body may have begun."""
        return self._over is None

    def end(self) -> None:
        """Let the client's next body begin; calls after the first one do nothing."""
        over, self._over = self._over, None
        if over is not None:
            over()


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
        if mine.done():
            mine.result().end()
        else:
            waiting.remove(mine)

    def _refusal(self, reason: str, why: str) -> Saturated:
        self._count_refusal(reason)
        return Saturated(f"{why}; retry after {SOON} s", retry_after=SOON)

    def _work(self) -> None:
        """Let one caller work until its next await; callbacks that are scheduled already run after that."""
        self._is_worked_on = True
        asyncio.get_running_loop().call_soon(self._worked)

    def _worked(self) -> None:
        self._is_worked_on = False
        while self._next:
            client, waiting = next(iter(self._next.items()))
            following = waiting.popleft()
            del self._next[client]
            if waiting:
                self._next[client] = waiting
            if not following.done():
                following.set_result(None)
                self._work()
                return
