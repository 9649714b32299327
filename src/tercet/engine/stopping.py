"""The stop of an engine at SIGTERM: its routers first move its sequences to other engines."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
from collections.abc import Callable

from tercet.aio import TaskSet

logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.05
HEARD_SECONDS = 0.3
"""Seconds until every router knows that the engine stops, and its earlier calls have arrived."""


class StopWhenEmpty:
    """The decision when an engine stops after a stop request.

    ``announce`` notifies its routers, and returns their number. ``is_empty`` returns True if the engine holds nothing
    for others. ``stop`` ends the engine: once it is empty, after ``grace`` seconds at the latest, or at a second
    request. Without routers and work it stops at once.
    """

    def __init__(
        self, announce: Callable[[], int], is_empty: Callable[[], bool], stop: Callable[[], object], grace: float
    ) -> None:
        self._announce = announce
        self._is_empty = is_empty
        self._stop = stop
        self._grace = grace
        self.is_asked = False
        self._tasks = TaskSet()

    def ask(self) -> None:
        """Request a stop of the engine."""
        asked_before, self.is_asked = self.is_asked, True
        if asked_before or not self._grace:
            self._tasks.cancel()
            self._stop()
            return
        self._tasks.spawn(self._stop_when_empty(), "stop when empty")

    async def _stop_when_empty(self) -> None:
        try:
            async with asyncio.timeout(self._grace):
                if self._announce():
                    logger.warning("the engine stops when it is empty, in %g s at the latest", self._grace)
                    await asyncio.sleep(HEARD_SECONDS)
                while True:
                    if self._is_empty():
                        break
                    await asyncio.sleep(POLL_INTERVAL_S)
        except TimeoutError:
            logger.warning("the engine stops with running work: it is not empty after %g s", self._grace)
        except Exception:  # the stop was requested, and must not be lost
            logger.exception("the engine stops with running work: it is not known whether it is empty")
        self._stop()


def fail_at_exit(reason: str) -> None:
    """Log the ``reason`` and make this process exit with 1: a server may exit with 0 also after its core was lost."""
    logger.critical("the engine ends with exit code 1: %s", reason)

    def fail() -> None:
        atexit.unregister(fail)
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  # those that were registered earlier
        logging.shutdown()
        os._exit(1)

    atexit.register(fail)
