"""The load reports of a simulated engine, like those in the token streams of real engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tercet.protocol import EngineLoad

REPORT_SECONDS = 0.1
"""Shortest interval between load reports, as in the token streams of real engines."""


class LoadReports:
    """Reports of one engine's load after changes: ``tell`` is called at most once per :data:`REPORT_SECONDS`.

    Each change is reported within that time, so an old last report still holds. Idle engines cost nothing.
    """

    def __init__(self, load: Callable[[], EngineLoad], tell: Callable[[EngineLoad], None]) -> None:
        self._load = load
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def changed(self) -> None:
        """Report a change of the load, now or when the interval has passed."""
        if self._timer is None:
            if self._loop.time() >= self._due:
                self._report()
            else:
                self._timer = self._loop.call_at(self._due, self._report)

    def _report(self) -> None:
        self._timer = None
        self._due = self._loop.time() + REPORT_SECONDS
        self._tell(self._load())
