"""Threads next to an event loop that may be busy without pause."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
# Length of the loop's turn between two waits for the thread, in units of one wait.
LOOP_PARTS = 4


async def run_in_thread(function: Callable[..., T], *args: object) -> T:
    """Return the result of ``function``; a busy loop leaves time for it. If the caller is cancelled, it continues.

    Each system call releases the interpreter's lock. A thread that wants the lock back is woken whenever the loop polls
    for events, finds the lock taken, and waits again: a busy loop delays it by tens of turns at each call. So the loop
    waits for the thread without the lock, each time no longer than the interpreter's switch interval.
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
