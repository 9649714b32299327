"""A decode engine, or one process of it alone, is stopped while clients read its tokens: they get the same answers.

It stops its engines, so it has a fleet of its own.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from typing import Any

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


@pytest.mark.parametrize(
    ("name", "which"),
    [("decode-0", "engine"), ("decode-0", "api"), ("decode-0", "core"), ("decode-0", "agent"), ("prefill-0", "engine")],
)
async def test_streams_survive_an_engine_that_stands_still(freezable: Fleet, which: str, name: str) -> None:
    calm = [await read(freezable.url, body) for body in BODIES]
    found = processes_of(engine_of(freezable, name)["url"])
    tree = [RunningProcess(each.pid, each.ppid(), " ".join(each.cmdline())) for each in found]
    kinds: dict[str, Any] = {**classify(found[0].pid, tree)}
    pids = set(kinds[which])
    stopped = [each for each in found if each.pid in pids]
    assert stopped, f"{name} has no {which}: {tree}"
    chunks, last = [0] * len(BODIES), dict[int, float]()
    gap, is_stopped = 0.0, False

    def count(index: int) -> None:
        nonlocal is_stopped, gap
        chunks[index] += 1
        now = time.monotonic()
        gap = max(gap, now - last.get(index, now))
        last[index] = now
        if not is_stopped and min(chunks) >= 5:
            is_stopped = True
            send_signal(stopped, signal.SIGSTOP)

    try:
        async with asyncio.timeout(SECONDS):
            answers = await asyncio.gather(
                *(read(freezable.url, body, lambda index=index: count(index)) for index, body in enumerate(BODIES))
            )
            # What comes while it is stopped is served by the others.
            later = await read(freezable.url, {"prompt": prompt_of(300, seed=1), "temperature": 0})
    finally:
        send_signal(stopped, signal.SIGCONT)
    assert is_stopped
    print(f"{name}, its {which} stopped: the longest gap of a stream {gap:.1f} s")
    assert [answer[:2] for answer in answers] == [answer[:2] for answer in calm]
    assert later[:2] == calm[0][:2]
    async with asyncio.timeout(SECONDS):
        while not engine_of(freezable, name)["reachable"]:
            await asyncio.sleep(0.5)
    for engine in get_json(f"{freezable.url}/tercet/v1/engines"):
        assert engine["in_flight"] == 0
        async with HttpEngine(engine["name"], engine["url"]) as client:
            await settled(client, 60)
