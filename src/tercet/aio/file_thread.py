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
"""Timeout of one call, which takes about a millisecond on a working file system."""
STUCK_SECONDS = 1.0


class FileThread:
    """Runs calls one after the other, each for ``bound_s`` at most; after ``stuck_s`` no further calls are started."""

    def __init__(self, bound_s: float = BOUND_SECONDS, stuck_s: float = STUCK_SECONDS) -> None:
        self._bound_s = bound_s
        self._stuck_s = stuck_s
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._began: float | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether a call hangs for such a long time that no others should be started, here or elsewhere."""
        began = self._began
        return began is not None and time.monotonic() - began > self._stuck_s

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Return the result of ``function``, which continues if the caller is cancelled.

        Raises ``TimeoutError`` if it takes too long, and at once while an earlier call does.
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
        """Finish the calls that were requested, then ``last``, and accept no others.

        ``last`` gives back what calls have taken whose callers did not wait for them.
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
