"""A sequence's outputs, from where they arrive to the task that waits for them."""

from __future__ import annotations

import asyncio
from collections import deque

from tercet.protocol import Output, Take, TercetError


class Outputs:
    """A queue for one reader, whose :meth:`put` is a :data:`~tercet.streams.inbox.Deliver`.

    Outputs that come while the reader waits, but for one that ends the sequence, are offered to ``take`` first.
    """

    __slots__ = ("_ready", "_waiter", "take")

    def __init__(self) -> None:
        self.take: Take | None = None
        self._ready: deque[Output | TercetError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: Output | TercetError) -> None:
        """Something arrived."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            self._ready.append(output)
            return
        # The reader waits, so it has had everything before this.
        if self.take is not None and isinstance(output, Output) and output.finish_reason is None and self.take(output):
            return
        self._ready.append(output)
        waiter.set_result(None)

    async def get(self) -> Output:
        """The next output; raises the :class:`~tercet.protocol.TercetError` that came in its place."""
        while not self._ready:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        found = self._ready.popleft()
        if isinstance(found, TercetError):
            raise found
        return found
