"""`tercet` as a process, and the numbers of processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from .conftest import START_SECONDS, answers
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
    command = [sys.executable, "-m", "tercet.cli", *args]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as run:
        try:
            deadline = time.monotonic() + START_SECONDS
            while not answers(url):
                if run.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"tercet {args[0]} does not answer:\n{log.read_text()[-4000:]}")
                time.sleep(0.2)
            yield
        finally:
            run.terminate()


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
