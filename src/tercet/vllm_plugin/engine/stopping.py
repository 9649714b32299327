"""SIGTERM empties an engine before it stops: what runs here goes on elsewhere first, as its front doors see to it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from tercet.aio import TaskSet

logger = logging.getLogger(__name__)
LOOK_SECONDS = 0.05
HEARD_SECONDS = 0.3
"""Until every front door has heard that the engine stops, and what it had sent here before that has arrived."""


class StopWhenEmpty:
    """Decides when an engine that has been asked to stop does so.

    ``announce`` tells its front doors, and returns how many there are. ``is_empty`` says whether it holds nothing for
    anybody. ``stop`` ends it: once it is empty, after ``grace`` seconds at the latest, or when it is asked again. With
    no front door and nothing to wait for that is at once.
    """

    def __init__(
        self, announce: Callable[[], int], is_empty: Callable[[], bool], stop: Callable[[], object], grace: float
    ) -> None:
        self._announce = announce
        self._is_empty = is_empty
        self._stop = stop
        self._grace = grace
        self._asked = False
        self._tasks = TaskSet()

    def ask(self) -> None:
        """Somebody wants the engine to stop."""
        if self._asked or not self._grace:
            self._tasks.cancel()
            self._stop()
            return
        self._asked = True
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
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            logger.warning("the engine stops with something still running: it is not empty after %g s", self._grace)
        self._stop()


def stop_on_sigterm(stop: StopWhenEmpty) -> None:
    """From now on SIGTERM asks ``stop``, in place of vLLM's own handler. To be called when the server starts up.

    Relies on vLLM handling SIGINT as it does SIGTERM, and having set both handlers before its server starts up.
    """
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.ask)


def let_vllm_stop() -> None:
    """Have vLLM's own handler run."""
    signal.raise_signal(signal.SIGINT)
