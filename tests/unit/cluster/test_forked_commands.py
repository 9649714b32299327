"""Commands that a guard has a warm parent fork: ended, stopped, orphaned and refused as those that it runs itself."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tercet.cluster import guard
from tercet.cluster.child_process import READ_LATE, ROUTER, can_fork, early_differences, listening_for_guards
from tercet.cluster.guard import Forked
from tests.longest_wait import LONGEST_WAIT_S, wait_until

pytestmark = pytest.mark.processes
# Its children run the code of `python -c CODE`, with the output and the variables that were asked for.
PARENT = """
import json, os, socket, sys, threading, time
from tercet.aio.warm_parent import serve_forks

def child(descriptors):
    request, _, out, _ = descriptors
    wanted = json.load(open(request))
    os.dup2(out, 1)
    os.environ.update(wanted["env"])
    os.chdir(wanted["cwd"])
    exec(wanted["argv"][2], {})
    return 0

%s
serve_forks(socket.socket(fileno=int(sys.argv[1])), child)
"""


@dataclass
class WarmParent:
    address: Path
    process: subprocess.Popen[bytes]


@contextmanager
def parent_that(does_before: str = "") -> Generator[WarmParent]:
    with listening_for_guards() as (address, listening):
        fd = listening.fileno()
        process = subprocess.Popen([sys.executable, "-c", PARENT % does_before, str(fd)], pass_fds=[fd])
        listening.close()
        try:
            yield WarmParent(address, process)
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def parent() -> Iterator[WarmParent]:
    with parent_that() as made:
        yield made


class Run:
    """A guard whose command is `python -c CODE`; closing `stdin` is the end of the process that wants it."""

    def __init__(self, address: Path, code: str, grace: float = 1.0, **env: str) -> None:
        command = [sys.executable, "-I", "-S", guard.__file__, str(grace), guard.FROM, str(address)]
        self.guard = subprocess.Popen(
            [*command, sys.executable, "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0, env={**os.environ, **env},
        )  # fmt: skip

    def line(self) -> str:
        assert self.guard.stdout is not None
        return self.guard.stdout.readline().decode().rstrip("\n")

    def members(self) -> list[int]:
        """What runs in its group beyond the guard."""
        found = [each.pid for each in psutil.process_iter() if self._is_member(each)]
        return [pid for pid in found if pid != self.guard.pid]

    def commands(self) -> list[int]:
        """The same, without the process that watches the guard, which the guard forks of itself."""
        return [pid for pid in self.members() if guard.__file__ not in psutil.Process(pid).cmdline()]

    def _is_member(self, process: psutil.Process) -> bool:
        try:
            return os.getpgid(process.pid) == self.guard.pid and process.status() != psutil.STATUS_ZOMBIE
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False

    def until_empty(self) -> None:
        wait_until(lambda: not self.members())

    def ends(self) -> int:
        with self.guard:
            return self.guard.wait(LONGEST_WAIT_S)


WAITS = "import os, time; print(os.getppid(), flush=True); time.sleep(600)"


@pytest.mark.parametrize(("code", "expected"), [("pass", 0), ("raise SystemExit(5)", 5), ("1 / 0", 1)])
def test_the_exit_code_is_the_commands(parent: WarmParent, code: str, expected: int) -> None:
    assert Run(parent.address, code).ends() == expected


def test_it_has_the_guards_group_output_directory_and_variables(parent: WarmParent) -> None:
    code = "import os; print(os.getpgrp(), os.getppid(), os.getcwd(), os.environ['GIVEN'])"
    run = Run(parent.address, code, GIVEN="here")
    assert run.line() == f"{run.guard.pid} {parent.process.pid} {os.getcwd()} here"
    assert run.ends() == 0


def test_sigterm_reaches_it(parent: WarmParent) -> None:
    run = Run(parent.address, WAITS)
    run.line()
    run.guard.terminate()
    assert run.ends() == 128 + signal.SIGTERM
    run.until_empty()


def test_a_killed_command_is_reported(parent: WarmParent) -> None:
    run = Run(parent.address, WAITS)
    run.line()
    (command,) = run.commands()
    os.kill(command, signal.SIGKILL)
    assert run.ends() == 128 + signal.SIGKILL


def test_it_ends_with_the_process_that_wants_it(parent: WarmParent) -> None:
    run = Run(parent.address, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAITS)
    run.line()
    assert run.guard.stdin is not None
    run.guard.stdin.close()
    assert run.ends() == -signal.SIGKILL
    run.until_empty()


def test_it_goes_on_without_the_warm_parent_and_its_end_is_seen(parent: WarmParent) -> None:
    run = Run(parent.address, WAITS)
    run.line()
    (command,) = run.commands()
    parent.process.kill()
    parent.process.wait()
    assert run.commands() == [command]
    os.kill(command, signal.SIGTERM)
    assert run.ends() == guard.UNKNOWN


@pytest.mark.parametrize(
    ("does_before", "said"),
    [
        ("threading.Thread(target=time.sleep, args=(600,), daemon=True).start()", "2 Python threads"),
        ("os._exit(3)", "the warm parent has ended|Connection refused"),
    ],
)
def test_where_it_is_not_forked_the_guard_runs_it_and_says_why(does_before: str, said: str) -> None:
    with parent_that(does_before) as parent:
        run = Run(parent.address, "import os; print(os.getppid())")
        assert re.search(said, run.line())
        assert run.line() == str(run.guard.pid)
        assert run.ends() == 0


def test_a_parent_that_dies_before_it_reports_a_fork_leaves_one_command() -> None:
    dies = "socket.send_fds = lambda *_: (time.sleep(1), os.kill(os.getpid(), 9))"
    with parent_that(dies) as parent:
        run = Run(parent.address, WAITS)
        assert "the warm parent has ended" in run.line()
        assert run.line() == str(run.guard.pid)
        (command,) = run.commands()
        os.kill(command, signal.SIGTERM)
        assert run.ends() == 128 + signal.SIGTERM


def test_without_a_warm_parent_the_guard_runs_it_and_says_why(tmp_path: Path) -> None:
    run = Run(tmp_path / "nowhere", "import os; print(os.getppid())")
    assert "No such file" in run.line()
    assert run.line() == str(run.guard.pid)
    assert run.ends() == 0


def test_told_to_stop_before_it_was_forked_it_never_runs() -> None:
    with parent_that("sys.stdin.readline()") as parent:
        os.kill(parent.process.pid, signal.SIGSTOP)
        run = Run(parent.address, WAITS)
        until_waiting(run.guard.pid)
        run.guard.terminate()
        assert run.ends() == 128 + signal.SIGTERM
        os.kill(parent.process.pid, signal.SIGCONT)
        run.until_empty()


def test_when_its_owner_ends_before_it_was_forked_it_never_runs(tmp_path: Path) -> None:
    """Not in place of a fork either, when the warm parent ends meanwhile as well."""
    written = tmp_path / "written"
    with parent_that("sys.stdin.readline()") as parent:
        os.kill(parent.process.pid, signal.SIGSTOP)
        run = Run(parent.address, f"open({str(written)!r}, 'w'); {WAITS}")
        until_waiting(run.guard.pid)
        assert run.guard.stdin is not None
        run.guard.stdin.close()
        parent.process.kill()
        assert run.ends() == -signal.SIGKILL
        run.until_empty()
    assert not written.exists()


def until_waiting(pid: int) -> None:
    """Until the process sleeps and has its handlers."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    while True:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        if status["State"].startswith("S") and int(status["SigCgt"], 16) & 1 << (signal.SIGTERM - 1):
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_warm_parent_that_does_not_answer_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(guard, "ANSWER_SECONDS", 0.0)
    written = tmp_path / "written"
    with listening_for_guards() as (address, _):
        forked = Forked(str(address), [sys.executable, "-c", f"open({str(written)!r}, 'w')"])
        assert forked.timeout() == 0.0
        wait_until(lambda: forked.poll() is not None)
    assert forked.poll() == 0
    assert written.exists()


def test_a_guard_of_another_session_is_refused(parent: WarmParent) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.settimeout(LONGEST_WAIT_S)
        channel.connect(str(parent.address))
        stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        try:
            channel.send(f"fork {stranger.pid}".encode())
            assert channel.recv(1000) == b"refused it is in another session"
        finally:
            stranger.kill()
            stranger.wait()


# ---- what a fork may differ in --------------------------------------------------------------------------------------


def test_variables_that_are_read_at_import_must_be_the_same() -> None:
    here = {"HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "tercet", "TERCET_SECRET": "a", "PATH": "/bin"}
    wanted = {"HF_HUB_OFFLINE": "0", "VLLM_PLUGINS": "", "TERCET_SECRET": "b", "PATH": "/bin", "OMP_NUM_THREADS": "2"}
    wanted |= {"OTEL_SERVICE_NAME": "s", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_BSP_SCHEDULE_DELAY": "9"}
    wanted["OTEL_PROPAGATORS"] = "b3"  # of these the one that OpenTelemetry reads when it is imported
    assert early_differences(here, wanted, READ_LATE) == ["HF_HUB_OFFLINE", "OMP_NUM_THREADS", "OTEL_PROPAGATORS"]


def test_commands_that_can_be_forked() -> None:
    assert can_fork([sys.executable, "-m", "tercet.vllm_plugin.start.server", "--model", "m"])
    assert can_fork([sys.executable, "-m", "tercet.cli", "router"])
    assert can_fork([sys.executable, "-c", ROUTER, "router.json"])
    assert not can_fork([sys.executable, "-m", "vllm.entrypoints.openai.api_server"])
    assert not can_fork([sys.executable, "-c", "tercet.cli"])
    assert not can_fork([sys.executable, "-m"])
