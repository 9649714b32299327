"""Threads next to an event loop that may be busy all the time."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
# Time that the loop runs between two waits for the thread, in units of one wait.
LOOP_PARTS = 4


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
