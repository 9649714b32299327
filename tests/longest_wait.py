"""How long a test waits for something that must happen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LONGEST_WAIT_S = 60.0
"""Only a failure takes so long: what takes milliseconds on a quiet machine took up to 20 s on two CPUs with a load of
37.

A test whose subject is an early end sets the timeout that would end it anyway to more than this.
"""


async def until(condition: Callable[[], object]) -> None:
    """Return once the condition is true."""
    async with asyncio.timeout(LONGEST_WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)
