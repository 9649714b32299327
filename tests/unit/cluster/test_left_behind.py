"""What ended fleets leave: logs, of which the newest are kept, and shared memory, of which nothing is."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tercet.cluster import detached_fleets as records
from tercet.cluster import running_fleet
from tercet.cluster.child_process import Process, StartFailed, shared_memory_of
from tercet.cluster.detached_fleets import (
    KEPT,
    DetachedFleet,
    ProcessStart,
    announced,
    boot_id,
    detached_fleets,
    log_directory,
    own_start,
)
from tercet.cluster.ports import free_ports
from tests.longest_wait import until

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
    await until(lambda: len(process.tail().split()) == 2)  # without buffers each name is written by itself
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
    records._hold(running)
    ended(logs, KEPT + 5)
    fleet = DetachedFleet(own_start(), 8000, "http://127.0.0.1:8000", str(detached), 1.0)
    with announced(fleet):
        records.remove_old(logs)
    assert foreign.exists()
    assert running.exists()
    assert detached.exists()
    assert len(list(logs.iterdir())) == KEPT - 1 + 3


def test_logs_of_an_ended_process_go_though_another_one_has_its_id(logs: Path) -> None:
    old = logs / f"20251123-120000-{os.getpid()}"  # as in containers, where each fleet is process 1
    old.mkdir(parents=True)
    os.utime(old, (0, 0))
    places = ended(logs, KEPT - 1)
    records.remove_old(logs)
    assert sorted(logs.iterdir()) == places


def test_a_place_of_ones_own_is_left_alone(logs: Path, tmp_path: Path) -> None:
    places = ended(logs, KEPT + 5)
    assert log_directory(str(tmp_path / "mine")) == tmp_path / "mine"
    assert sorted(logs.iterdir()) == places


# ---- which fleet runs ------------------------------------------------------------------------------------------------


def fleet_of(process: ProcessStart, url: str = "http://127.0.0.1:8000") -> DetachedFleet:
    return DetachedFleet(process, 8000, url, "logs", 1.0)


def test_a_process_is_known_by_its_start_and_not_by_the_clock_of_the_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of that clock moves the time at which the machine, and so each process, seems to have started."""
    here = own_start()
    monkeypatch.setattr("psutil.boot_time", lambda: 1.0)
    monkeypatch.setattr("psutil.Process.create_time", lambda _: 1.0)
    monkeypatch.setattr("time.time", lambda: 1.0)
    assert own_start() == here
    assert here.runs


def test_another_process_with_the_id_is_not_it() -> None:
    here = own_start()
    assert not msgspec.structs.replace(here, ticks=here.ticks - 1).runs
    assert not msgspec.structs.replace(here, boot="another start of the machine").runs
    assert not msgspec.structs.replace(here, pid=NOBODY).runs


def test_two_fleets_with_one_port_at_two_addresses_are_two(logs: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        stat = Path(f"/proc/{child.pid}/stat").read_text()
        other = ProcessStart(child.pid, boot_id(), int(stat[stat.rindex(")") + 1 :].split()[19]))
        with announced(fleet_of(own_start())), announced(fleet_of(other, "http://10.0.0.1:8000")):
            assert {fleet.url for fleet in detached_fleets()} == {"http://127.0.0.1:8000", "http://10.0.0.1:8000"}
            child.kill()
            child.wait()
            assert [fleet.url for fleet in detached_fleets()] == ["http://127.0.0.1:8000"]
        assert detached_fleets() == []
    finally:
        child.kill()
        child.wait()


SERVER = """
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
if len(sys.argv) > 2:
    time.sleep(600)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.slow
async def test_a_process_is_not_ready_because_another_one_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_fleet, "ASK_SECONDS", 0.05)
    (port,) = free_ports("127.0.0.1", 1)
    url = f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-c", SERVER, str(port)]
    first, second = Process("a", argv, {}, tmp_path / "a", 1.0), Process("b", [*argv, "late"], {}, tmp_path / "b", 1.0)
    try:
        for process in (first, second):
            await process.start()
        async with asyncio.timeout(60):
            await running_fleet.until_ready(first, url, lambda *_: None)
        monkeypatch.setattr(running_fleet, "READY_SECONDS", 0.5)
        with pytest.raises(StartFailed, match=r"does not listen at .*: another process answers there"):
            await running_fleet.until_ready(second, url, lambda *_: None)
    finally:
        await first.stop()
        await second.stop()
