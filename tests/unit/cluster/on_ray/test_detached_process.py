"""A guarded process that is no child of who started it, and does not outlive it, however that one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tercet.protocol import EngineError
from tercet_ray.fleet_keeper import CoreClaims, DetachedProcess
from tests.longest_wait import wait_until

pytestmark = pytest.mark.processes
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


def group_of(pid: int) -> list[int]:
    found: list[int] = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def test_it_is_no_child_and_is_stopped(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = DetachedProcess([sys.executable, "-c", SLEEPER], {}, log, grace=20)
    process.start()
    try:
        wait_until(lambda: "up" in log.read_text())
        assert process.pid not in [child.pid for child in psutil.Process().children(recursive=True)]
        assert not process.ended_within(0)
    finally:
        process.stop()
    wait_until(lambda: not group_of(process.pid))


def test_one_that_ignores_the_signal_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = DetachedProcess([sys.executable, "-c", STUBBORN], {}, log, grace=0.2)
    process.start()
    wait_until(lambda: "up" in log.read_text())
    process.stop()
    wait_until(lambda: not group_of(process.pid))


def test_its_own_end_is_noticed(tmp_path: Path) -> None:
    process = DetachedProcess([sys.executable, "-c", "raise SystemExit(3)"], {}, tmp_path / "log")
    process.start()
    assert process.ended_within(60)
    process.stop()


def test_what_cannot_be_started_leaves_nothing(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    process = DetachedProcess(["true"], {}, tmp_path / "missing" / "log")
    with pytest.raises(EngineError, match="cannot be started"):
        process.start()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_owner(tmp_path: Path, number: int) -> None:
    log = tmp_path / "log"
    owner = f"""
        import sys, time
        from pathlib import Path
        from tercet_ray.fleet_keeper import DetachedProcess
        process = DetachedProcess([sys.executable, "-c", {SLEEPER!r}], {{}}, Path({str(log)!r}), grace=20)
        process.start()
        print(process.pid, flush=True)
        time.sleep(600)
    """
    started = subprocess.Popen([sys.executable, "-c", textwrap.dedent(owner)], stdout=subprocess.PIPE)
    assert started.stdout is not None
    pid = int(started.stdout.readline())
    wait_until(lambda: "up" in log.read_text())
    started.send_signal(number)
    started.wait()
    wait_until(lambda: not group_of(pid))


def test_cores_are_claimed_once_and_given_back(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    first, second = CoreClaims(tmp_path), CoreClaims(tmp_path)
    assert first.claim(1) == (mine[0],)
    assert second.claim(len(mine)) == tuple(mine), "more than there are free: the others' too"
    first.release()
    second.release()
    assert CoreClaims(tmp_path).claim(1) == (mine[0],)
