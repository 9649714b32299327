"""Runs one command and never outlives its parent: ``python guard.py GRACE COMMAND...``, a pipe as standard input.

The parent holds the other end of that pipe and writes nothing. When the parent ends, however it ends, the pipe closes
and everything in this process group is stopped: the command, its children, and what they left behind, with SIGTERM, and
after ``GRACE`` seconds with SIGKILL. SIGTERM to this process is passed on; the command's exit code is then its own.
Needs the standard library alone, so that it starts at once and stays small.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from types import FrameType

# After the command is gone its children may still give back shared memory.
STRAGGLER_SECONDS = 1.0
PARENT = 0


class Guard:
    """The command as a child, and the signals that tell what is wanted of it."""

    def __init__(self, grace: float, command: list[str]) -> None:
        self._grace = grace
        self._asked_to_stop = False
        self._wakeup = _wake_on_signals()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._ask_to_stop)
        self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def run(self) -> int:
        """Wait for the child's end; returns its exit code, 128 + N if signal N ended it."""
        passed_on = False
        while self._child.poll() is None:
            if self._asked_to_stop and not passed_on:
                passed_on = True
                os.killpg(0, signal.SIGTERM)
            if self._parent_is_gone():
                self._end_group()
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
        time.sleep(STRAGGLER_SECONDS)
        os.killpg(0, signal.SIGKILL)


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
