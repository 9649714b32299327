"""Runs one command and never outlives its parent: ``python guard.py GRACE COMMAND...``, a pipe as standard input.

The parent holds the other end of that pipe and writes nothing. When the parent ends, however it ends, the pipe closes
and everything in this process group is stopped: the command, its children, and what they left behind, with SIGTERM, and
after ``GRACE`` seconds with SIGKILL. A second process does that if this one is killed. SIGTERM to this process is
passed on; the command's exit code is then its own. Needs the standard library alone, so that it starts at once and
stays small.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from types import FrameType

# After the command is gone its children may still give back shared memory.
STRAGGLER_SECONDS = 1.0
PARENT = 0
# Where vLLM makes the files of its sockets.
SOCKETS = "VLLM_RPC_BASE_PATH"
SOCKETS_PREFIX = "tercet-sockets-"
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None)


class Guard:
    """The command as a child, and the signals that tell what is wanted of it."""

    def __init__(self, grace: float, command: list[str]) -> None:
        self._grace = grace
        self._asked_to_stop = False
        self._wakeup = _wake_on_signals()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._ask_to_stop)
        self._end_well = _watch_this_process(grace)
        this = os.getpid()
        self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=lambda: _end_with(this))

    def run(self) -> int:
        """Wait for the child's end; returns its exit code, 128 + N if signal N ended it."""
        passed_on = False
        while self._child.poll() is None:
            if self._asked_to_stop and not passed_on:
                passed_on = True
                os.killpg(0, signal.SIGTERM)
            if self._parent_is_gone():
                self._end_group()
        os.write(self._end_well, b"\n")
        code = self._child.returncode
        return code if code >= 0 else 128 - code

    def _ask_to_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._asked_to_stop = True

    def _parent_is_gone(self) -> bool:
        """Sleep until a signal arrives or the parent's end of the pipe closes; tell whether it closed."""
        ready, _, _ = select.select([PARENT, self._wakeup], [], [])
        if self._wakeup in ready:
            os.read(self._wakeup, 4096)
        return PARENT in ready and not os.read(PARENT, 4096)

    def _end_group(self) -> None:
        """Never returns: this process is part of the group that it kills."""
        os.killpg(0, signal.SIGTERM)
        deadline = time.monotonic() + self._grace
        while self._child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        _end_what_is_left()


def _remove_sockets() -> None:
    """Those of vLLM, which nobody else removes once the parent is gone."""
    place = os.environ.get(SOCKETS, "")
    if os.path.basename(place).startswith(SOCKETS_PREFIX):
        shutil.rmtree(place, ignore_errors=True)


def _end_what_is_left() -> None:
    """Never returns."""
    time.sleep(STRAGGLER_SECONDS)
    _remove_sockets()
    os.killpg(0, signal.SIGKILL)


def _watch_this_process(grace: float) -> int:
    """Have a second process end the group if this one is killed, as it may be together with the parent.

    Returns what to write to when this process ends well.
    """
    watched, held = os.pipe()
    child = os.fork()
    if child:
        os.close(watched)
        os.waitpid(child, 0)
        return held
    os.close(held)
    if os.fork():  # the command shall be the only child
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the group gets them, and this process ends with the guard
    if os.read(watched, 1):
        os._exit(0)
    os.killpg(0, signal.SIGTERM)
    time.sleep(grace)
    _end_what_is_left()
    os._exit(1)


def _end_with(guard: int) -> None:
    """In the command: it is asked to end when the guard does, even if whoever watches the guard was killed as well."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != guard:
        os.kill(os.getpid(), signal.SIGTERM)


def _wake_on_signals() -> int:
    """A file descriptor that becomes readable with every handled signal, a child's end included."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A handler, unlike SIG_IGN, makes the signal wake us, and is not inherited by the command.
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    return reader


def main(grace: float, command: list[str]) -> int:
    """Run ``command`` under guard."""
    try:
        guard = Guard(grace, command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    return guard.run()


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
