"""What a process does next to its main work: background tasks, threads next to a busy loop, signals to end.

A background task that fails is logged once and run again: :func:`repeat` for work in turns, :func:`keep_running` for
work that contains its own loop, :class:`TaskSet` to own such tasks and end them together.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")
AGAIN_S = 1.0
"""Seconds between the error of a background task and its next start."""
WELL_S = 10.0
"""Seconds after which a background task that was started again counts as working."""
MOST_LOGGED, LONGEST_LOGGED = 16, 500
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GROUPS_FIXED_IN = (3, 13)
_MENDED = "_tercet_mended"
# Time that the loop runs between two waits for the thread, in units of one wait.
LOOP_PARTS = 4


def is_cancelled() -> bool:
    """True if the running task was asked to end, and the request was not taken back."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class Failures:
    """The log of one background task's errors: each different one is logged once, until the task works again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._logged = set[str]()

    def log(self, error: Exception) -> None:
        """Log the error unless it was logged since the task worked last."""
        text = f"{type(error).__name__}: {error}"[:LONGEST_LOGGED]
        # Errors may contain numbers that differ each time: the log must not grow with them.
        if text in self._logged or len(self._logged) >= MOST_LOGGED:
            return
        self._logged.add(text)
        logger.error("%s failed and is tried again: %s", self._name, text, exc_info=error)

    def works(self) -> None:
        """Log once that the task works again."""
        if self._logged:
            logger.warning("%s works again", self._name)
            self._logged.clear()


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
            failures.log(error)
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
            # It has worked in the meantime, so the same error is news.
            if loop.time() - began >= WELL_S:
                failures = Failures(name)
            failures.log(error)
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
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def keep(self, work: Callable[[], Awaitable[object]], name: str) -> asyncio.Task[None]:
        """Start a task that runs ``work`` until it returns, and again after each error: see :func:`keep_running`."""
        return self.spawn(keep_running(work, name), name)

    def cancel(self) -> None:
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


@contextmanager
def signals_to(first: Callable[[], object], second: Callable[[], object]) -> Generator[list[int]]:
    """Call ``first`` on the event loop at the first signal to end, and ``second`` at the second, while entered.

    Later signals change nothing. Yield the list of the signals received so far. On exit the default handlers return, so
    a signal ends the process. A signal that is ignored on entry stays ignored: ``nohup`` relies on this to keep a
    process alive when its terminal closes.
    """
    loop = asyncio.get_running_loop()
    handled = [number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    asked: list[int] = []

    def take(number: int) -> None:
        asked.append(number)
        if len(asked) <= 2:
            (first if len(asked) == 1 else second)()

    for number in handled:
        loop.add_signal_handler(number, take, number)
    try:
        yield asked
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)


def keep_cancellation_counts() -> None:
    """Correct :class:`asyncio.TaskGroup` in this process: it takes back each cancellation that it has requested itself.

    Before CPython 3.13, a group whose task fails cancels the task that waits for the group, and does not take that
    back. The waiting task continues, but counts as cancelled from then on (:meth:`asyncio.Task.cancelling`). Users'
    programs run in tasks in which this count distinguishes a client's disconnect from any other failure.
    """
    group: Any = asyncio.TaskGroup
    if sys.version_info >= GROUPS_FIXED_IN or hasattr(group, _MENDED):
        return
    leave = group.__aexit__

    @wraps(leave)
    async def leave_and_take_back(self: Any, *failure: Any) -> Any:
        asked_before = self._parent_cancel_requested  # requests that the group takes back by itself
        try:
            return await leave(self, *failure)
        finally:
            if self._parent_cancel_requested and not asked_before:
                self._parent_task.uncancel()

    group.__aexit__ = leave_and_take_back
    setattr(group, _MENDED, True)


async def run_in_thread(function: Callable[..., T], *args: object) -> T:
    """Return the result of ``function``, which runs in a thread; a busy event loop leaves time for it.

    If the caller is cancelled, the function continues. Each system call of the thread releases the interpreter's lock.
    The thread is woken when the loop polls for events, finds the lock taken, and waits again: a busy loop delays it by
    tens of turns at each call. So the loop waits for the thread without the lock, each time at most one switch interval
    of the interpreter.
    """
    ended = threading.Event()

    def work() -> T:
        try:
            return function(*args)
        finally:
            ended.set()

    working = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        while not ended.wait(sys.getswitchinterval()):
            await asyncio.wait([working], timeout=LOOP_PARTS * sys.getswitchinterval())
        return await working
    except asyncio.CancelledError:
        working.cancel()
        raise
