"""Tasks that run in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")
AGAIN_S = 1.0
"""Seconds between the error of a background task and its next start."""
WELL_S = 10.0
"""Seconds after which a background task that was started again counts as working."""
MOST_TOLD, LONGEST_TOLD = 16, 500


def is_cancelled() -> bool:
    """True if the running task was asked to end, and the request was not taken back."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class Failures:
    """The log of one background task's errors: each different one is logged once, until the task works again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._told = set[str]()

    def tell(self, error: Exception) -> None:
        """Log the error unless it was logged since the task worked last."""
        text = f"{type(error).__name__}: {error}"[:LONGEST_TOLD]
        if text in self._told or len(self._told) >= MOST_TOLD:
            return
        self._told.add(text)
        logger.error("%s failed and is tried again: %s", self._name, text, exc_info=error)

    def works(self) -> None:
        """Log once that the task works again."""
        if self._told:
            logger.warning("%s works again", self._name)
            self._told.clear()


def _end_if_cancelled() -> None:
    """End a cancelled task whose clean-up failed: the error of the clean-up has replaced the cancellation."""
    if is_cancelled():
        raise asyncio.CancelledError


async def repeat(work: Callable[[], Awaitable[object]], pause_s: float, name: str) -> None:
    """Run ``work`` in a loop, with ``pause_s`` seconds after each run, until cancelled.

    An error of ``work`` does not end the loop: it is logged once under the task's ``name``.
    """
    failures = Failures(name)
    while True:
        try:
            await work()
        except Exception as error:
            failures.tell(error)
            _end_if_cancelled()
        else:
            failures.works()
        await asyncio.sleep(pause_s)


async def keep_running(work: Callable[[], Awaitable[object]], name: str) -> None:
    """Run ``work``, which contains a loop, and run it again when it has raised an error.

    Return when ``work`` returns. An error is logged once under the task's ``name``, and once more if ``work`` ran for
    :data:`WELL_S` seconds since; ``work`` is run again :data:`AGAIN_S` seconds after an error.
    """
    failures, loop = Failures(name), asyncio.get_running_loop()
    while True:
        began = loop.time()
        try:
            await work()
            return
        except Exception as error:
            if loop.time() - began >= WELL_S:
                failures = Failures(name)
            failures.tell(error)
            _end_if_cancelled()
        await asyncio.sleep(AGAIN_S)


class TaskSet:
    """A set of background tasks. It references each task until the task ends.

    The event loop keeps only weak references.

    The failure of a task is logged. A caller may also await a spawned task: the failure is then raised there, and
    logged.
    """

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Start ``work`` as a task on the running event loop, and return the task."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def keep(self, work: Callable[[], Awaitable[object]], name: str) -> asyncio.Task[None]:
        """Start a task that runs ``work`` until it returns, and again after each error: see :func:`keep_running`."""
        return self.spawn(keep_running(work, name), name)

    def cancel(self) -> None:
        """Ask all tasks to end now."""
        for task in self._tasks:
            task.cancel()

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait at most ``seconds`` for the tasks to end, and return True if all have. No task is cancelled."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        return not self._tasks

    async def close(self, seconds: float = 5.0) -> bool:
        """Cancel all tasks, wait at most ``seconds`` for their clean-up, and return True if all have ended."""
        self.cancel()
        return await self.wait(seconds)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            logger.error("%s failed: %s: %s", task.get_name(), type(error).__name__, error, exc_info=error)
