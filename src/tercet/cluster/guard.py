"""Program that runs one command and ends with its parent: ``python guard.py GRACE COMMAND...``, with a pipe as stdin.

With ``python guard.py GRACE --from SOCKET COMMAND...`` the warm parent (in :mod:`tercet.cluster.child_process`) that
listens at the socket forks the process of the command; if it does not answer, the command is started as usual.

The parent holds the other end of that pipe and writes nothing. When the parent ends, for any reason, the pipe closes
and every process of this process group gets SIGTERM, and after ``GRACE`` seconds SIGKILL: the command, its children,
and processes that they left behind. A second process does this if this one is killed. This process forwards SIGTERM,
and exits with the command's exit code. The program needs only the standard library, so that it starts fast and stays
small.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Protocol

# Time for children to release shared memory after the command's end.
STRAGGLER_SECONDS = 1.0
PARENT = 0
# The directory of vLLM's socket files.
SOCKETS = "VLLM_RPC_BASE_PATH"
SOCKETS_PREFIX = "tercet-sockets-"
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None)


FROM = "--from"


class Child(Protocol):
    """The command's process. ``ready``: descriptors that become readable when the result of :meth:`poll` may change."""

    ready: Sequence[int]

    def timeout(self) -> float | None:
        """Return the seconds until :meth:`poll` must be called at the latest; None for no limit."""
        ...

    def poll(self) -> int | None:
        """Return the exit code, -N if signal N ended the process; None while it runs."""
        ...

    def forget(self) -> bool:
        """Cancel the start of the process if it does not exist yet; return True in that case."""
        ...


class Spawned:
    """A child of this process; SIGCHLD signals its end."""

    ready: Sequence[int] = ()

    def __init__(self, command: Sequence[str]) -> None:
        # Inherited descriptors, such as a socket, are for the command only. All others are closed by exec.
        this = os.getpid()
        self._child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, close_fds=False, preexec_fn=lambda: _end_with(this)
        )
        _close_what_is_given()

    def timeout(self) -> float | None:
        return None

    def poll(self) -> int | None:
        return self._child.poll()

    def forget(self) -> bool:
        return False


class Forked:
    """A child of the warm parent at ``address``, in this process's group.

    The fork waits until the parent has imported its modules. If the parent refuses, ends or does not answer within
    :data:`ANSWER_SECONDS`, the command is spawned instead. Raises :class:`OSError` if no parent listens.
    """

    def __init__(self, address: str, command: Sequence[str]) -> None:
        self._command = command
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.connect(address)
        self._deadline = time.monotonic() + ANSWER_SECONDS
        self._pidfd = -1
        self._code: int | None = None
        self._spawned: Spawned | None = None
        self.ready: Sequence[int] = (self._channel.fileno(),)
        wanted = {"argv": list(command), "env": dict(os.environ), "cwd": os.getcwd()}
        with open(os.memfd_create("tercet-command"), "w+b") as request, open(os.devnull, "rb") as nothing:
            request.write(json.dumps(wanted).encode())
            request.seek(0)
            given = [request.fileno(), nothing.fileno(), sys.stdout.fileno(), sys.stderr.fileno()]
            socket.send_fds(self._channel, [f"fork {os.getpgrp()}".encode()], given)

    def timeout(self) -> float | None:
        return max(0.0, self._deadline - time.monotonic()) if self._is_awaited() else None

    def poll(self) -> int | None:
        if self._spawned is None and self._code is None:
            self._look()
        return self._code if self._spawned is None else self._spawned.poll()

    def forget(self) -> bool:
        awaited = self._is_awaited()
        if awaited:
            self._channel.close()  # the parent kills a child that it cannot report
        return awaited

    def _is_awaited(self) -> bool:
        return self._spawned is None and self._pidfd < 0

    def _look(self) -> None:
        if self._channel.fileno() >= 0 and select.select([self._channel], [], [], 0)[0]:
            self._receive()
        elif self._is_awaited():
            if time.monotonic() >= self._deadline:
                self._spawn(f"the warm parent has not answered for {ANSWER_SECONDS:.0f} s")
        elif select.select([self._pidfd], [], [], 0)[0] and self.ready == (self._pidfd,):
            self._code = UNKNOWN

    def _receive(self) -> None:
        message, descriptors = b"", list[int]()
        with suppress(OSError):
            message, descriptors, _, _ = socket.recv_fds(self._channel, 4096, 1)
        word, _, rest = message.decode().partition(" ")
        if word == "forked":
            self._pidfd = descriptors[0]
            self.ready = (self._channel.fileno(), self._pidfd)
        elif word == "ended":
            self._code = int(rest.split()[1])
        elif self._is_awaited():
            self._spawn(rest or "the warm parent has ended")
        else:
            self._channel.close()  # the warm parent has ended, and its children continue
            self.ready = (self._pidfd,)

    def _spawn(self, reason: str) -> None:
        print(f"tercet: starting without shared imports: {reason}", flush=True)
        self._channel.close()
        self.ready = ()
        self._spawned = Spawned(self._command)


ANSWER_SECONDS = 120.0
UNKNOWN = 1
"""Exit code for a process whose real code is unknown, since its parent ended first."""


def start(command: list[str]) -> Child:
    """Start the command's process, by fork of a warm parent if one is given; raise :class:`OSError`."""
    if command[0] != FROM:
        return Spawned(command)
    try:
        return Forked(command[1], command[2:])
    except OSError as error:
        print(f"tercet: starting without shared imports: {command[1]}: {error.strerror}", flush=True)
        return Spawned(command[2:])


class Guard:
    """The command's process, and the signals that control it."""

    def __init__(self, grace: float, command: list[str]) -> None:
        self._grace = grace
        self._asked_to_stop = False
        # Readable at every handled signal, including the end of a child.
        reader, writer = os.pipe()
        # The signal handler writes there, and must never wait.
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # Unlike SIG_IGN, a handler lets the signal wake this process, and the command does not inherit it.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        self._wakeup = reader
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._ask_to_stop)
        self._end_well = _watch_this_process(grace)
        self._child = start(command)

    def run(self) -> int:
        """Wait for the child's end, and return its exit code, or 128 + N if signal N ended it."""
        passed_on = False
        while (code := self._child.poll()) is None:
            if self._asked_to_stop and not passed_on:
                if self._child.forget():
                    code = -signal.SIGTERM
                    break
                passed_on = True  # this process is in the group, so the signal comes back to it
                os.killpg(0, signal.SIGTERM)
            # Sleep until a signal arrives, the child may have changed, or the parent's end of the pipe closes.
            ready, _, _ = select.select([PARENT, self._wakeup, *self._child.ready], [], [], self._child.timeout())
            if self._wakeup in ready:
                os.read(self._wakeup, 4096)
            if PARENT in ready and not os.read(PARENT, 4096):
                # End the process group, of which this process is a member: nothing after this runs.
                if self._child.forget():
                    _end_what_is_left()
                os.killpg(0, signal.SIGTERM)
                deadline = time.monotonic() + self._grace
                while self._child.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.05)
                _end_what_is_left()
        # The second process learns that this is a normal end, and ends too instead of killing the group.
        os.write(self._end_well, b"\n")
        return code if code >= 0 else 128 - code

    def _ask_to_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._asked_to_stop = True


def _remove_sockets() -> None:
    """Remove vLLM's socket files, which no other process removes once the parent has ended."""
    place = os.environ.get(SOCKETS, "")
    if os.path.basename(place).startswith(SOCKETS_PREFIX):
        shutil.rmtree(place, ignore_errors=True)


def _end_what_is_left() -> None:
    """Kill the process group after a pause for clean-up; the call does not return."""
    time.sleep(STRAGGLER_SECONDS)
    _remove_sockets()
    os.killpg(0, signal.SIGKILL)


def _watch_this_process(grace: float) -> int:
    """Start a second process that ends the group if this one is killed, perhaps together with the parent.

    Returns a descriptor; this process writes to it before a normal end.
    """
    # Forked twice, so that the watcher is a child of init: this process waits for its command only, and the watcher
    # does not become a zombie here.
    watched, held = os.pipe()
    child = os.fork()
    if child:
        os.close(watched)
        os.waitpid(child, 0)
        return held
    os.close(held)
    _close_what_is_given()
    if os.fork():  # the command must be the only child
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the guard forwards them to the group; this process ends with the guard
    # One byte is a normal end. The end of the pipe without one is that of a guard that was killed.
    if os.read(watched, 1):
        os._exit(0)
    os.killpg(0, signal.SIGTERM)
    time.sleep(grace)
    _end_what_is_left()
    os._exit(1)


def _close_what_is_given() -> None:
    """Close descriptors that are for the command only."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the descriptor that was used to list them is closed by now
            if fd > 2 and os.get_inheritable(fd):
                os.close(fd)


def _end_with(guard: int) -> None:
    """Make this process, the command, end when the guard ends, even if the guard's watcher was killed too."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != guard:
        os.kill(os.getpid(), signal.SIGTERM)


def main(grace: float, command: list[str]) -> int:
    """Run ``command`` under a guard, and return its exit code."""
    try:
        guard = Guard(grace, command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    return guard.run()


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
