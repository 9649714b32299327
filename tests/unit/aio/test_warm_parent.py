"""A warm parent over a real socket: it forks tiny children, says how they end, and refuses where a fork is unsound."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tercet.aio.warm_parent import FORK, MOST_BYTES
from tests.longest_wait import LONGEST_WAIT_S

pytestmark = pytest.mark.processes
# A child does what the pipe that it gets says; the parent does BEFORE, then serves.
PARENT = """
import os, random, signal, socket, sys, threading, time
from tercet.aio.warm_parent import serve_forks

def child(descriptors):
    task, out = descriptors
    return eval(os.read(task, 1000).decode(), globals(), {"out": out})

%s
with socket.socket(fileno=int(sys.argv[1])) as channel:
    serve_forks(channel, child)
"""


@dataclass
class Parent:
    channel: socket.socket
    process: subprocess.Popen[bytes]

    def fork(self, task: str, out: int = 2) -> tuple[str, int]:
        """Its answer, and the child's pidfd, which is the caller's to close; -1 without one."""
        reading, writing = os.pipe()
        try:
            os.write(writing, task.encode())
            socket.send_fds(self.channel, [FORK], [reading, out])
        finally:
            os.close(reading)
            os.close(writing)
        message, fds, _, _ = socket.recv_fds(self.channel, MOST_BYTES, 1)
        return message.decode(), fds[0] if fds else -1

    def said(self) -> str:
        return self.channel.recv(MOST_BYTES).decode()


def started(before: str = "") -> Iterator[Parent]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(LONGEST_WAIT_S)
    with ours:
        with theirs:
            command = [sys.executable, "-c", PARENT % before, str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        try:
            yield Parent(ours, process)
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def parent(request: pytest.FixtureRequest) -> Iterator[Parent]:
    yield from started(getattr(request, "param", ""))


@pytest.mark.parametrize(("task", "code"), [("0", 0), ("7", 7), ("sys.exit(3)", 3), ("1 / 0", 1)])
def test_a_childs_exit_code_is_reported(parent: Parent, task: str, code: int) -> None:
    answer, pidfd = parent.fork(task)
    os.close(pidfd)
    word, pid = answer.split()
    assert word == "forked"
    assert parent.said() == f"ended {pid} {code}"


def test_a_child_is_signalled_by_its_pidfd(parent: Parent) -> None:
    answer, pidfd = parent.fork("time.sleep(60)")
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)
    assert parent.said() == f"ended {answer.split()[1]} {-signal.SIGKILL}"


def test_descriptors_are_passed_and_random_numbers_differ(parent: Parent) -> None:
    drawn = set[bytes]()
    for _ in range(2):
        reading, writing = os.pipe()
        _, pidfd = parent.fork("os.write(out, str(random.random()).encode()) and 0", writing)
        os.close(pidfd)
        os.close(writing)
        assert parent.said().endswith(" 0")
        drawn.add(os.read(reading, 100))
        assert os.read(reading, 1) == b"", "the parent has kept the descriptor"
        os.close(reading)
    assert len(drawn) == 2


def test_it_ends_with_its_channel_and_children_go_on(parent: Parent) -> None:
    _, pidfd = parent.fork("time.sleep(60)")
    try:
        parent.channel.close()
        assert parent.process.wait(LONGEST_WAIT_S) == 0
        assert select.select([pidfd], [], [], 0)[0] == []
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert select.select([pidfd], [], [], LONGEST_WAIT_S)[0] == [pidfd]
    finally:
        os.close(pidfd)


def test_the_end_of_a_child_is_seen_without_the_parent(parent: Parent) -> None:
    _, pidfd = parent.fork("time.sleep(60)")
    try:
        parent.process.kill()
        assert parent.said() == ""
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert select.select([pidfd], [], [], LONGEST_WAIT_S)[0] == [pidfd]
    finally:
        os.close(pidfd)


@pytest.mark.parametrize(
    ("parent", "reason"),
    [
        ("threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "it has 2 Python threads"),
        ("kept = socket.socket()", "it has open sockets"),
        (
            "os.environ['PROMETHEUS_MULTIPROC_DIR'] = f'/proc/{os.getpid()}'; kept = open('/proc/self/maps')",
            "it has open metrics files",
        ),
        (
            "import types; sys.modules['torch'] = types.SimpleNamespace("
            "cuda=types.SimpleNamespace(is_initialized=lambda: True))",
            "it has initialised CUDA",
        ),
    ],
    indirect=["parent"],
)
def test_it_refuses_what_a_fork_must_not_share(parent: Parent, reason: str) -> None:
    answer, pidfd = parent.fork("0")
    assert pidfd == -1
    assert answer.startswith(f"refused {reason}")
    assert parent.process.poll() is None
