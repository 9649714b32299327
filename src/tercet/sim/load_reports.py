"""What a simulated engine reports of its load, as real ones do with their token streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tercet.protocol import EngineLoad

REPORT_SECONDS = 0.1
"""Between two reports of load, as real engines' token streams have it."""


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
