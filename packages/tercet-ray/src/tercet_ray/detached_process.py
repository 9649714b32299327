"""A guarded process that is not a child of this one, and that ends with this one, even after SIGKILL."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tercet.cluster import guard
from tercet.cluster.child_process import GRACE_SECONDS
from tercet.protocol import EngineError
from tercet_ray import forked_guard

START_SECONDS = 30.0


class DetachedProcess:
    """One start of a command. Several threads may call its methods, except :meth:`start`.

    A pipe, whose other end the guard reads, is the only connection between the command and this process.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path, grace: float = GRACE_SECONDS) -> None:
        self._argv = argv
        self._env = env
        self._log = log
        self._grace = grace
        self._lifeline = -1
        self._pidfd = -1
        self._sockets = ""
        self.pid = 0

    def start(self) -> None:
        """Start the command; raise :class:`~tercet.protocol.EngineError` if that fails."""
        guards_end, self._lifeline = os.pipe()
        self._sockets = tempfile.mkdtemp(prefix=guard.SOCKETS_PREFIX)
        python = [sys.executable, "-I", "-S"]
        command = [*python, guard.__file__, str(self._grace), *self._argv]
        try:
            started = subprocess.run(
                [*python, forked_guard.__file__, str(self._log), *command],
                stdin=guards_end, capture_output=True, timeout=START_SECONDS, check=True,
                env={**os.environ, guard.SOCKETS: self._sockets, **self._env},
            )  # fmt: skip
            self.pid = int(started.stdout)
            self._pidfd = os.pidfd_open(self.pid)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self.close()
            raise EngineError(f"a process cannot be started: {error}") from error
        finally:
            os.close(guards_end)

    def ended_within(self, seconds: float) -> bool:
        """Return True if the guard, and with it the command, has ended or ends within ``seconds``."""
        return self._pidfd < 0 or bool(select.select([self._pidfd], [], [], seconds)[0])

    def terminate(self) -> None:
        """Send SIGTERM to the command's group."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def stop(self) -> None:
        """Stop the command: SIGTERM, and SIGKILL to the group after the grace period."""
        self.terminate()
        self.ended_within(self._grace)
        if self.pid:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.close()

    def let_go(self) -> None:
        """Close the pipe and return at once; the guard then sends SIGTERM, and SIGKILL after the grace period."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
        self._lifeline = -1

    def close(self) -> None:
        """Close the pipe, and release the resources of this process for the command."""
        self.let_go()
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._pidfd = -1
        shutil.rmtree(self._sockets, ignore_errors=True)
