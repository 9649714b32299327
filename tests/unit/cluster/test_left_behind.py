"""What ended fleets leave: logs, of which the newest are kept, and shared memory, of which nothing is."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tercet.cluster import log_directories
from tercet.cluster.child_process import Process, shared_memory_of
from tercet.cluster.detached_fleets import DetachedFleet, announced, own_start
from tercet.cluster.log_directories import KEPT, log_directory

# A process id that no process has: the kernel's largest is smaller.
NOBODY = 99_999_999
MAPS = """
import multiprocessing, multiprocessing.resource_tracker as tracker, time
from multiprocessing.shared_memory import SharedMemory
tracker.register = lambda *_: None
memory = SharedMemory(create=True, size=4096)
lock = multiprocessing.get_context("spawn").Lock()
print(memory.name, "sem." + lock._semlock.name[1:], flush=True)
time.sleep(600)
"""


async def test_shared_memory_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    process = Process("p", [sys.executable, "-c", MAPS], {}, tmp_path / "log")
    await process.start()
    while not process.tail():
        await asyncio.sleep(0.01)
    memory = {Path("/dev/shm") / name for name in process.tail().split()}
    group = process.pid or 0
    assert shared_memory_of(group) == memory
    process.remember_shared_memory()
    os.killpg(group, signal.SIGKILL)
    assert await process.ended() == -signal.SIGKILL
    assert not any(path.exists() for path in memory)
    await process.stop()


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TERCET_CACHE", str(tmp_path))
    return tmp_path / "logs"


def ended(logs: Path, count: int) -> list[Path]:
    places = [logs / f"20261123-1200{number:02}-{NOBODY}" for number in range(count)]
    for place in places:
        place.mkdir(parents=True)
        (place / "router.log").touch()
    return places


def test_the_newest_logs_are_kept(logs: Path) -> None:
    places = ended(logs, KEPT + 5)
    new = log_directory(None)
    assert sorted(logs.iterdir()) == sorted([*places[-KEPT + 1 :], new])


def test_logs_of_fleets_that_run_and_what_is_called_otherwise_stay(logs: Path) -> None:
    foreign, running = logs / "mine", logs / f"20251123-120000-{os.getpid()}"
    detached = logs / f"20251123-120000-{NOBODY}"
    for place in (foreign, running, detached):
        place.mkdir(parents=True)
    ended(logs, KEPT + 5)
    fleet = DetachedFleet(os.getpid(), own_start(), 8000, "http://127.0.0.1:8000", str(detached), 1.0)
    with announced(fleet):
        log_directories.remove_old(logs)
    assert foreign.exists()
    assert running.exists()
    assert detached.exists()
    assert len(list(logs.iterdir())) == KEPT - 1 + 3


def test_logs_of_an_ended_process_go_though_another_one_has_its_id(logs: Path) -> None:
    old = logs / f"20251123-120000-{os.getpid()}"  # as in containers, where each fleet is process 1
    old.mkdir(parents=True)
    os.utime(old, (0, 0))
    places = ended(logs, KEPT - 1)
    log_directories.remove_old(logs)
    assert sorted(logs.iterdir()) == places


def test_a_place_of_ones_own_is_left_alone(logs: Path, tmp_path: Path) -> None:
    places = ended(logs, KEPT + 5)
    assert log_directory(str(tmp_path / "mine")) == tmp_path / "mine"
    assert sorted(logs.iterdir()) == places
