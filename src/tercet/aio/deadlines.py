"""Deadlines that all lie equally far in the future: one timer serves them all, and each costs a few bytes."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Expires(Protocol):
    """An object that waits for something until a deadline."""

    def expired(self) -> None:
        """Handle the end of the deadline; called when it has passed."""
        ...


class Deadlines:
    """Deadlines: :meth:`Expires.expired` is called on each object that is not discarded within ``seconds``.

    The calls run on the event loop on which this object was made.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._at: dict[Expires, float] = {}  # in order: each deadline is later than those before it
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._at)

    def set(self, waiting: Expires) -> None:
        """Set the deadline of ``waiting`` to ``seconds`` from now; an earlier deadline of it is replaced."""
        self._at.pop(waiting, None)
        self._at[waiting] = at = self._loop.time() + self._seconds
        if self._timer is None:
            self._timer = self._loop.call_at(at, self._look)

    def discard(self, waiting: Expires) -> None:
        """Remove the deadline of ``waiting``, if it has one."""
        self._at.pop(waiting, None)

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        over = list[Expires]()
        for waiting, at in self._at.items():
            if at > now:
                self._timer = self._loop.call_at(at, self._look)
                break
            over.append(waiting)
        for waiting in over:
            # An object that expires may discard others, or set them again.
            if self._at.get(waiting, now + 1) <= now:
                del self._at[waiting]
                waiting.expired()
