"""The present work of an engine for each sequence, so that an abort can end it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from tercet.protocol import UnknownSequence


class SequenceWork:
    """The running work of each sequence: at most one generation, and any number of sends.

    Each has a function that ends it early.
    """

    def __init__(self) -> None:
        self._stops: dict[tuple[str, str | None], Callable[[], object]] = {}  # a send has its id, a generation None

    def __len__(self) -> int:
        return len(self._stops)

    def generates(self, seq_id: str) -> bool:
        """True if the sequence generates here, or is about to."""
        return (seq_id, None) in self._stops

    def begin(self, seq_id: str, stop: Callable[[], object]) -> None:
        """Record the sequence's generation, which ``stop`` ends."""
        self._stops[seq_id, None] = stop

    def end(self, seq_id: str) -> None:
        """Forget the sequence's generation."""
        del self._stops[seq_id, None]

    def stop(self, seq_id: str) -> bool:
        """End all work for a sequence early; return whether there was any."""
        found = [stop for (busy, _), stop in self._stops.items() if busy == seq_id]
        for stop in found:
            stop()
        return bool(found)

    @asynccontextmanager
    async def sending(self, seq_id: str, send_id: str) -> AsyncGenerator[None]:
        """End the current task by ``UnknownSequence`` if the sequence is stopped within this context.

        Other cancellations of the task are unchanged.
        """
        until_aborted = asyncio.timeout(None)
        self._stops[seq_id, send_id] = lambda: until_aborted.expired() or until_aborted.reschedule(0)
        try:
            async with until_aborted:
                yield
        except TimeoutError:
            if not until_aborted.expired():
                raise
            raise UnknownSequence(f"{seq_id} was aborted while its KV was being sent", "seq_id") from None
        finally:
            del self._stops[seq_id, send_id]
