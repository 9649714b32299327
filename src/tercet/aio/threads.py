"""Threads beside an event loop that may have no rest."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
# Of the time until the thread has ended, in parts of those that the loop waits for it: four are the loop's own.
LOOP_PARTS = 4


async def run_in_thread(function: Callable[..., T], *args: object) -> T:
    """The result of ``function``, which a busy loop leaves time for; if the caller is cancelled, it goes on.

    Each call of the operating system gives the interpreter's lock up. A thread that wants it back is woken whenever the
    loop looks for events, finds the lock taken again, and begins to wait anew: a loop without rest keeps it away for
    tens of turns, and each call costs as long. So the loop waits for the thread without the lock, for no longer at
    a time than the interpreter leaves it to any other thread.
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
