"""File I/O outside the event loop, with a timeout: a file system that hangs blocks only one thread.

The thread is a daemon: a process whose file system hangs can still end.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
BOUND_SECONDS = 5.0
"""Timeout of one call, in seconds. A call takes about a millisecond on a working file system."""
STUCK_SECONDS = 1.0
"""Time after which a running call counts as stuck, in seconds."""


class FileThread:
    """A thread that runs calls one after the other, each with a timeout of ``bound_s``; none starts after a stuck one.

    A call is stuck when it has run for ``stuck_s`` seconds.
    """

    def __init__(self, bound_s: float = BOUND_SECONDS, stuck_s: float = STUCK_SECONDS) -> None:
        self._bound_s = bound_s
        self._stuck_s = stuck_s
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._began: float | None = None

    @property
    def is_stuck(self) -> bool:
        """True if a call has run for more than ``stuck_s`` seconds: start no other call, here or elsewhere."""
        began = self._began
        return began is not None and time.monotonic() - began > self._stuck_s

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Return the result of ``function``. The call continues if its caller is cancelled.

        Raise ``TimeoutError`` after ``bound_s`` seconds, or at once if an earlier call is stuck.
        """
        if self.is_stuck:
            raise TimeoutError
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def call() -> None:
            try:
                answer = _setter(result, function(*args))
            except BaseException as error:  # raised to the caller
                answer = _failing(result, error)
            with suppress(RuntimeError):  # the loop ended before the call
                loop.call_soon_threadsafe(answer)

        self._calls.put(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tercet-files", daemon=True)
            self._thread.start()
        async with asyncio.timeout(self._bound_s):
            return await result

    def close(self, last: Callable[[], None] | None = None) -> None:
        """Finish the calls that were requested, then run ``last``; later calls are not accepted.

        ``last`` releases resources that calls acquired after their callers had stopped waiting.
        """
        if last is not None:
            self._calls.put(last)
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._began = time.monotonic()
            try:
                call()
            finally:
                self._began = None


def _setter(result: asyncio.Future[Any], value: object) -> Callable[[], None]:
    return lambda: None if result.done() else result.set_result(value)


def _failing(result: asyncio.Future[Any], error: BaseException) -> Callable[[], None]:
    return lambda: None if result.done() else result.set_exception(error)
