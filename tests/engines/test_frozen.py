"""A decode engine, or one process of it alone, is stopped while clients read its tokens: they get the same answers.

It stops its engines, so it has a fleet of its own.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tercet.chaos.engine_processes import RunningProcess, classify
from tercet.client import HttpEngine

from .conftest import ENGINE_ARGS, Fleet, get_json, settled, start_fleet
from .prompts import prompt_of
from .test_failures import processes_of, send_signal
from .test_killed_decode import BODIES, read

SECONDS = 180


@pytest.fixture(scope="module")
def freezable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    running = start_fleet(
        tmp_path_factory.mktemp("frozen"), "--decode", "2", "--program-arg", "min_send=1", "--", *ENGINE_ARGS
    )
    yield running
    running.stop()


def engine_of(fleet: Fleet, name: str) -> dict[str, Any]:
    return next(engine for engine in get_json(f"{fleet.url}/tercet/v1/engines") if engine["name"] == name)


async def streams(fleet: Fleet, do: Callable[[], object]) -> tuple[list[tuple[str, str]], float]:
    """Texts and finish reasons of all streams, and the longest gap in one; ``do`` is called once all are under way."""
    chunks, last = [0] * len(BODIES), dict[int, float]()
    gap, waits = 0.0, [do]

    def count(index: int) -> None:
        nonlocal gap
        chunks[index] += 1
        now = time.monotonic()
        gap = max(gap, now - last.get(index, now))
        last[index] = now
        if waits and min(chunks) >= 5:
            waits.pop()()

    async with asyncio.timeout(SECONDS):
        answers = await asyncio.gather(
            *(read(fleet.url, body, lambda index=index: count(index)) for index, body in enumerate(BODIES))
        )
    assert not waits
    return [answer[:2] for answer in answers], gap


def processes_called(fleet: Fleet, name: str, which: str) -> list[psutil.Process]:
    found = processes_of(engine_of(fleet, name)["url"])
    tree = [RunningProcess(each.pid, each.ppid(), " ".join(each.cmdline())) for each in found]
    kinds: dict[str, Any] = {**classify(found[0].pid, tree)}
    chosen = [each for each in found if each.pid in kinds[which]]
    assert chosen, f"{name} has no {which}: {tree}"
    return chosen


async def all_is_back(fleet: Fleet, *names: str) -> None:
    async with asyncio.timeout(SECONDS):
        while not all(engine_of(fleet, name)["reachable"] for name in names):
            await asyncio.sleep(0.5)
    for name in names:
        engine = engine_of(fleet, name)
        assert engine["in_flight"] == 0
        async with HttpEngine(name, engine["url"]) as client:
            await settled(client, 60)


@pytest.mark.parametrize(
    ("name", "which"),
    [("decode-0", "engine"), ("decode-0", "api"), ("decode-0", "core"), ("decode-0", "agent"), ("prefill-0", "engine")],
)
async def test_streams_survive_an_engine_that_stands_still(freezable: Fleet, which: str, name: str) -> None:
    calm, _ = await streams(freezable, lambda: None)
    stopped = processes_called(freezable, name, which)
    try:
        answers, gap = await streams(freezable, lambda: send_signal(stopped, signal.SIGSTOP))
        later = await read(freezable.url, {"prompt": prompt_of(300, seed=1), "temperature": 0})
    finally:
        send_signal(stopped, signal.SIGCONT)
    print(f"{name}, its {which} stopped: the longest gap of a stream {gap:.1f} s")
    assert answers == calm
    assert later[:2] == calm[0], "what comes meanwhile is served by the others"
    await all_is_back(freezable, "prefill-0", "decode-0", "decode-1")
