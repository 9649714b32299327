"""How long a test waits for something that must happen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from inspect import isawaitable

LONGEST_WAIT_S = 60.0
"""Only a failure takes so long: what takes milliseconds on a quiet machine took up to 20 s on two CPUs with a load of
37.

A test whose subject is an early end sets the timeout that would end it anyway to more than this.
"""


async def until(condition: Callable[[], object], seconds: float = LONGEST_WAIT_S, every: float = 0.005) -> None:
    """Return once the condition is true, or what it lets one await; it is asked again after ``every`` seconds."""
    async with asyncio.timeout(seconds):
        while not (await found if isawaitable(found := condition()) else found):
            await asyncio.sleep(every)


def wait_until(condition: Callable[[], object], seconds: float = LONGEST_WAIT_S, every: float = 0.01) -> None:
    """Block until the condition is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it has not come about in {seconds} s"
        time.sleep(every)
