"""File I/O next to a loop: results, errors, and what does not return."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tercet.aio.files import FileThread
from tests.longest_wait import until


async def test_results_and_errors_are_the_callers() -> None:
    files = FileThread()
    assert await files.run(lambda a, b: a + b, 1, 2) == 3
    with pytest.raises(ZeroDivisionError):
        await files.run(lambda: 1 // 0)
    assert await asyncio.gather(*(files.run(lambda n=n: n) for n in range(50))) == list(range(50))
    files.close()


async def test_a_call_that_does_not_return_holds_up_nobody() -> None:
    files, go = FileThread(0.1, 0.05), threading.Event()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await files.run(go.wait)
    assert files.is_stuck
    for _ in range(1000):
        with pytest.raises(TimeoutError):
            await files.run(lambda: None)
    assert time.monotonic() - began < 20
    assert sum(thread.name == "tercet-files" and thread.daemon for thread in threading.enumerate()) >= 1
    go.set()
    await until(lambda: not files.is_stuck)
    assert await files.run(lambda: "again") == "again"
    files.close()


async def test_a_caller_that_leaves_disturbs_no_other() -> None:
    files, go = FileThread(), threading.Event()
    leaving = asyncio.create_task(files.run(go.wait))
    staying = asyncio.create_task(files.run(lambda: "stays"))
    await asyncio.sleep(0)
    leaving.cancel()
    go.set()
    assert await staying == "stays"
    files.close()
