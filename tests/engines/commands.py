"""`tercet` as a process, and the numbers of processes."""

from __future__ import annotations

import asyncio
import sys
import urllib.request
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from .conftest import running
from .prompts import complete, prompt_of

SECONDS = 400


def page(url: str) -> str:
    """What a process's /metrics says."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        return answer.read().decode()


def counted(url: str, name: str, **labels: str) -> float:
    """One of its numbers, summed over the labels that are not named."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        float(line.rpartition(" ")[2])
        for line in page(url).splitlines()
        if line.startswith((f"{name}{{", f"{name} ")) and all(label in line for label in wanted)
    )


@contextmanager
def tercet_process(log: Path, url: str, *args: str) -> Generator[None]:
    """`tercet` with these arguments, from when it answers at `url`."""
    with running([sys.executable, "-m", "tercet.cli", *args], log, url):
        yield


@asynccontextmanager
async def generating(url: str, requests: int, is_so: Callable[[], bool]) -> AsyncGenerator[None]:
    """While entered, an engine is asked for so many long answers; from when it is so."""
    asking = [
        asyncio.create_task(complete(url, prompt_of(8, n), max_tokens=2000, ignore_eos=True)) for n in range(requests)
    ]
    try:
        async with asyncio.timeout(SECONDS):
            while not is_so():
                assert not any(task.done() for task in asking)
                await asyncio.sleep(0.1)
        yield
        assert not any(task.done() for task in asking), "it was not busy to the end"
    finally:
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
