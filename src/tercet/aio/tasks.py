"""Tasks that run in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")


def is_cancelled() -> bool:
    """True if the running task was asked to end, and the request was not taken back."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def repeat(work: Callable[[], Awaitable[object]], pause_s: float) -> None:
    """Run ``work`` in a loop, with ``pause_s`` seconds after each run, until cancelled or until it raises."""
    while True:
        await work()
        await asyncio.sleep(pause_s)


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
