"""What a simulated engine says of itself while it runs, in virtual time: its load, and its cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from tercet.protocol import EngineLoad

REPORT_SECONDS = 0.1
"""Between two reports of load, as real engines' token streams have it."""


class SimObserver(Protocol):
    """Hears of one engine. Blocks are named by hashes that cover everything before them and the cache salt."""

    def load(self, load: EngineLoad) -> None:
        """How busy it is now."""
        ...

    def stored(self, hashes: Sequence[int]) -> None:
        """These blocks can be found in its cache now."""
        ...

    def dropped(self, hashes: Sequence[int]) -> None:
        """These cannot any more."""
        ...

    def cleared(self) -> None:
        """Its cache is empty, or will be told anew."""
        ...


class LoadReports:
    """Tells ``tell`` the load after changes, once in :data:`REPORT_SECONDS` at most; an engine at rest costs nothing.

    So the last report is never older than the load by more than that, however long ago it came.
    """

    def __init__(self, load: Callable[[], EngineLoad], tell: Callable[[EngineLoad], None]) -> None:
        self._load = load
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def changed(self) -> None:
        """Something changed."""
        if self._timer is None:
            if self._loop.time() >= self._due:
                self._report()
            else:
                self._timer = self._loop.call_at(self._due, self._report)

    def _report(self) -> None:
        self._timer = None
        self._due = self._loop.time() + REPORT_SECONDS
        self._tell(self._load())
