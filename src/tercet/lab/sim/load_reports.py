"""Load reports of a simulated engine, like those in real engines' token streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tercet.protocol import EngineLoad

REPORT_SECONDS = 0.1
"""Shortest interval of load reports, as in real engines' token streams."""


class LoadReports:
    """Calls ``tell`` with the load after changes, at most once per :data:`REPORT_SECONDS`; idle engines cost nothing.

    So the last report is never behind the load by more than that, however old it is.
    """

    def __init__(self, load: Callable[[], EngineLoad], tell: Callable[[EngineLoad], None]) -> None:
        self._load = load
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def changed(self) -> None:
        """Record a change."""
        if self._timer is None:
            if self._loop.time() >= self._due:
                self._report()
            else:
                self._timer = self._loop.call_at(self._due, self._report)

    def _report(self) -> None:
        self._timer = None
        self._due = self._loop.time() + REPORT_SECONDS
        self._tell(self._load())
