"""One child process: in a session of its own, with its output in a log file, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from tercet.protocol import BadRequest, TercetError

GRACE_SECONDS = 20.0
TAIL_LINES = 15
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class StartFailed(TercetError):
    """A process of the fleet ended or did not become ready; the message has the tail of its log."""

    code = "start_failed"


class Process:
    """A child called ``name``. Use :meth:`start`, then :meth:`stop` on every exit."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self._argv = argv
        self._env = env
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it; its output goes to the log."""
        with self.log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **self._env},
                start_new_session=True,
                # Should this process be killed outright, the child gets SIGTERM and takes its own children along.
                preexec_fn=_die_with_parent,
            )

    @property
    def returncode(self) -> int | None:
        """Exit code, or ``None`` while it runs."""
        return None if self._process is None else self._process.returncode

    async def ended(self) -> int:
        """Wait for its end; returns the exit code."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return await self._process.wait()

    def tail(self) -> str:
        """The last lines of its log that say something."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join([line for line in lines if line.strip()][-TAIL_LINES:])

    def failure(self, what: str) -> StartFailed:
        """An error that says what happened, with the log's tail and place."""
        return StartFailed(f"{self.name} {what}\n{self.tail()}\n(the whole log: {self.log})")

    async def stop(self, grace: float = GRACE_SECONDS) -> None:
        """SIGTERM to its whole session, SIGKILL to what is left after ``grace`` seconds."""
        process = self._process
        if process is None:
            return
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), grace)
        # Its children share the session: even after a clean exit, nothing of it may stay.
        self._signal(signal.SIGKILL)
        await process.wait()

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def require_free(host: str, port: int) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if somebody listens at ``host:port``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise BadRequest(
                f"port: {host}:{port} cannot be used: {error.strerror}; choose another --port", "port"
            ) from error


def free_ports(host: str, count: int) -> list[int]:
    """Ports that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]
