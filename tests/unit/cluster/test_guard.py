"""The guard: whatever happens to whom, in the end nothing of the group is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tercet.cluster.child_process import GRACE_SECONDS, Process

pytestmark = pytest.mark.processes

# A command with a child of its own; both ignore SIGTERM when told to.
COMMAND = """
import signal, subprocess, sys, time
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pids", child.pid, flush=True)
if sys.argv[1] == "ends":
    sys.exit(5)
time.sleep(600)
"""

PARENT = """
import asyncio, sys
from pathlib import Path
from tercet.cluster.child_process import Process
async def main():
    process = Process("p", [sys.executable, "-c", sys.argv[1], sys.argv[2]], {}, Path(sys.argv[3]), grace=3)
    await process.start()
    print(process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def members(pgid: int) -> list[psutil.Process]:
    """Everything alive in a process group, orphans included."""
    return [process for process in psutil.process_iter() if _pgid(process.pid) == pgid and _alive(process)]


def _pgid(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def empties(pgid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while members(pgid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not members(pgid)


def until_running(log: Path) -> None:
    while not (log.exists() and "pids" in log.read_text()):
        time.sleep(0.02)


def start_parent(tmp_path: Path, mode: str) -> tuple[subprocess.Popen[bytes], int]:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, COMMAND, mode, str(tmp_path / "p.log")], stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


@pytest.mark.parametrize("moment", ["at once", "running"])
def test_a_killed_parent_takes_the_whole_group_along(tmp_path: Path, moment: str) -> None:
    parent, pgid = start_parent(tmp_path, "obedient")
    if moment == "running":
        until_running(tmp_path / "p.log")
        assert len(members(pgid)) == 4  # the guard, who watches it, the command and its child
    parent.kill()
    parent.wait()
    assert empties(pgid, 10)


def test_also_when_the_command_ignores_sigterm(tmp_path: Path) -> None:
    parent, pgid = start_parent(tmp_path, "stubborn")
    until_running(tmp_path / "p.log")
    parent.kill()
    parent.wait()
    assert not empties(pgid, 1)
    assert empties(pgid, 10)


async def start(tmp_path: Path, mode: str, grace: float = GRACE_SECONDS) -> Process:
    process = Process("p", [sys.executable, "-c", COMMAND, mode], {}, tmp_path / "p.log", grace)
    await process.start()
    await asyncio.to_thread(until_running, tmp_path / "p.log")
    return process


async def test_the_commands_exit_code_is_passed_on_and_its_child_ended(tmp_path: Path) -> None:
    process = await start(tmp_path, "ends")
    assert await process.ended() == 5
    assert process.pid
    assert not members(process.pid)


async def test_a_command_that_is_killed_is_told_apart(tmp_path: Path) -> None:
    process = await start(tmp_path, "obedient")
    assert process.pid
    (command,) = psutil.Process(process.pid).children()
    command.kill()
    assert await process.ended() == 128 + signal.SIGKILL
    assert not members(process.pid)


async def test_a_killed_guard_is_the_end_of_its_command(tmp_path: Path) -> None:
    process = await start(tmp_path, "stubborn")
    assert process.pid
    os.kill(process.pid, signal.SIGKILL)
    assert await process.ended() == -signal.SIGKILL
    assert not members(process.pid)


async def test_it_stays_in_our_session(tmp_path: Path) -> None:
    process = await start(tmp_path, "obedient")
    assert process.pid
    assert os.getpgid(process.pid) == process.pid
    # Linux schedules sessions against one another: see docs/operations.md.
    assert os.getsid(process.pid) == os.getsid(0)
    await process.stop()


async def test_stopping_is_quick_when_everybody_obeys(tmp_path: Path) -> None:
    process = await start(tmp_path, "obedient", grace=100)
    assert process.pid
    began = time.monotonic()
    await process.stop()
    assert time.monotonic() - began < 50
    assert not members(process.pid)
    await process.stop()


@pytest.mark.parametrize("after", [0.0, 0.005, 0.02, 0.05, 0.1])
async def test_stopping_right_after_the_start(tmp_path: Path, after: float) -> None:
    process = Process("p", [sys.executable, "-c", COMMAND, "obedient"], {}, tmp_path / "p.log")
    await process.start()
    assert process.pid
    await asyncio.sleep(after)
    await process.stop()
    assert not members(process.pid)


async def test_cancelling_stop_still_ends_everything(tmp_path: Path) -> None:
    process = await start(tmp_path, "obedient")
    assert process.pid
    stopping = asyncio.create_task(process.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert await asyncio.to_thread(empties, process.pid, 10)


async def test_a_command_that_does_not_exist_is_said_in_the_log(tmp_path: Path) -> None:
    process = Process("p", ["/no/such/program"], {}, tmp_path / "p.log")
    await process.start()
    assert await process.ended() == 127
    assert "cannot run /no/such/program: No such file" in process.tail()


async def test_no_file_descriptor_is_left(tmp_path: Path) -> None:
    async def once() -> None:
        process = await start(tmp_path, "obedient")
        await process.stop()
        (tmp_path / "p.log").unlink()

    await once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await once()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_the_tail_is_what_a_reader_needs(tmp_path: Path) -> None:
    log = tmp_path / "p.log"
    log.write_bytes(b"\xff early\n" * 100_000 + b"".join(b"line %d\n\n" % index for index in range(40)))
    lines = Process("p", [], {}, log).tail().splitlines()
    assert lines == [f"line {index}" for index in range(25, 40)]


@pytest.mark.parametrize("mode", ["waits", "stubborn"])
def test_a_parent_and_its_guard_that_are_killed_together_leave_nothing(tmp_path: Path, mode: str) -> None:
    parent, guard = start_parent(tmp_path, mode)
    until_running(tmp_path / "p.log")
    os.kill(parent.pid, signal.SIGSTOP)  # neither sees the other's end
    os.kill(guard, signal.SIGSTOP)
    parent.kill()
    os.kill(guard, signal.SIGKILL)
    parent.wait()
    assert empties(guard, 20)


def test_without_its_guard_and_whoever_watches_it_the_command_is_asked_to_end(tmp_path: Path) -> None:
    parent, guard = start_parent(tmp_path, "waits")
    until_running(tmp_path / "p.log")
    guards = [each for each in members(guard) if any(part.endswith("guard.py") for part in each.cmdline())]
    (command,) = psutil.Process(guard).children()
    sockets = psutil.Process(guard).environ()["VLLM_RPC_BASE_PATH"]
    assert len(guards) == 2
    for process in (parent, *guards):
        process.kill()
    parent.wait()
    try:
        assert psutil.wait_procs([command], 20)[1] == []
    finally:
        for process in members(guard):
            process.kill()
        Path(sockets).rmdir()  # nobody was left who could


async def test_files_of_sockets_go_with_their_process(tmp_path: Path) -> None:
    log = tmp_path / "p.log"
    script = """
import os, time
place = os.environ["VLLM_RPC_BASE_PATH"]
open(place + "/one", "w").close()
print(place, flush=True)
time.sleep(600)
"""
    process = Process("p", [sys.executable, "-c", script], {}, log, grace=1)
    await process.start()
    try:
        async with asyncio.timeout(60):
            while not (place := log.read_text().strip()):
                await asyncio.sleep(0.02)
        assert [each.name for each in Path(place).iterdir()] == ["one"]
    finally:
        await process.stop()
    assert not Path(place).exists()


def test_files_of_sockets_go_though_the_parent_is_killed(tmp_path: Path) -> None:
    parent, guard = start_parent(tmp_path, "waits")
    until_running(tmp_path / "p.log")
    place = Path(psutil.Process(guard).environ()["VLLM_RPC_BASE_PATH"])
    assert place.is_dir()
    parent.kill()
    parent.wait()
    assert empties(guard, 20)
    assert not place.exists()
