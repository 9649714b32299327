"""A consumer that is cancelled at a given await."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from tercet.protocol import OutputStream


async def cancelled_after(steps: int, outputs: Callable[[], OutputStream | AsyncGenerator[Any]]) -> None:
    """Consume outputs in a task, cancel it after ``steps`` iterations of the loop, and wait for its end."""

    async def consume() -> None:
        async with aclosing(outputs()) as found:
            async for _ in found:
                await asyncio.sleep(0)

    task = asyncio.create_task(consume())
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
