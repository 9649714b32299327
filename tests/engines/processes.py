"""The processes of an engine: found by the port that it listens at, signalled, and started anew where it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import psutil

from tercet.chaos.engine_processes import RunningProcess, classify
from tercet.chaos.fault_schedule import ProcessKind
from tercet.cluster import guard

GRACE_SECONDS = 10


def processes_of(url: str) -> list[psutil.Process]:
    """The server that listens at `url`, and all its children."""
    port = int(url.rsplit(":", 1)[1])
    listening = [
        process
        for process in psutil.process_iter()
        if any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in _connections(process))
    ]
    assert listening, f"nobody listens at {url}"
    return [listening[0], *listening[0].children(recursive=True)]


def _connections(process: psutil.Process) -> list:
    try:
        return process.net_connections(kind="tcp")
    except psutil.Error:
        return []


def part_of(url: str, kind: ProcessKind) -> list[psutil.Process]:
    """The processes of that kind of the engine at `url`; all of them for "engine"."""
    found = processes_of(url)
    tree = [RunningProcess(each.pid, each.ppid(), " ".join(each.cmdline())) for each in found]
    pids = classify(found[0].pid, tree).get(kind, ())
    chosen = [each for each in found if each.pid in pids]
    assert chosen, f"the engine at {url} has no {kind}: {tree}"
    return chosen


def send_signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            continue


@contextmanager
def stopped(processes: list[psutil.Process]) -> Generator[None]:
    """While entered, they stand still."""
    send_signal(processes, signal.SIGSTOP)
    try:
        yield
    finally:
        send_signal(processes, signal.SIGCONT)


class EnginePlace:
    """Where an engine runs, and the command that starts one there."""

    def __init__(self, name: str, url: str, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.url = url
        self._argv = list(argv)
        self._environment = dict(environment)
        self.log = log
        self._server: psutil.Process | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @classmethod
    def of(cls, name: str, url: str, log: Path) -> Self:
        """The place of an engine that runs; what starts there later writes to `log`."""
        server = processes_of(url)[0]
        place = cls(name, url, server.cmdline(), server.environ(), log)
        place._server = server
        return place

    def beside(self, name: str, port: int, log: Path) -> EnginePlace:
        """A place for an engine like this one, which is yet to be started."""
        argv = list(self._argv)
        argv[argv.index("--port") + 1] = str(port)
        url = f"{self.url.rpartition(':')[0]}:{port}"
        return EnginePlace(name, url, argv, {**self._environment, "TERCET_ENGINE_NAME": name}, log)

    @property
    def is_dead(self) -> bool:
        """Whether the engine that was started here last has ended."""
        if self._server is None and self._guard is not None and self._guard.poll() is None:
            self._server = next(iter(psutil.Process(self._guard.pid).children()), None)
            return False  # it has only just been started
        try:
            return self._server is None or self._server.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def start(self) -> None:
        """Start an engine here, and return at once. It ends at the latest when this process does."""
        self.stop()
        command = [sys.executable, guard.__file__, str(GRACE_SECONDS), *self._argv]
        with self.log.open("ab") as log:
            self._guard = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )

    def stop(self) -> None:
        """End the engine that was started here; one that somebody else started is theirs."""
        if self._guard is not None:
            self._guard.terminate()
            self._guard.communicate(timeout=6 * GRACE_SECONDS)
        self._guard = self._server = None
