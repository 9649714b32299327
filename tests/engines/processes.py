"""The processes of an engine: found by the port that it listens at, signalled, and started anew where it was."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import psutil

from tercet.cluster.engine_command import EngineSpec, engine_argv, engine_env
from tercet_checks.chaos.chaos_report import ProcessKind
from tercet_checks.chaos.real_fleet import RunningProcess, classify
from tests.warm import start_guarded

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


# Tests read traces also where a request has passed a proxy.
TRACED = {"TERCET_CLIENT_TRACES": "1"}


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
    def of(cls, spec: EngineSpec, log: Path, **environment: str) -> Self:
        """The place of an engine of that description, which is yet to be started; it writes to `log`."""
        environment = {**os.environ, **engine_env(spec), **TRACED, **environment}
        return cls(spec.name, f"http://{spec.host}:{spec.port}", engine_argv(spec), environment, log)

    @classmethod
    def taken(cls, spec: EngineSpec, log: Path) -> Self:
        """The place of an engine that somebody else has started; what starts there later writes to `log`."""
        place = cls.of(spec, log)
        place._server = processes_of(place.url)[0]
        return place

    @property
    def is_dead(self) -> bool:
        """Whether the engine that was started here last has ended."""
        if self._guard is not None:
            return self._guard.poll() is not None
        try:
            return self._server is None or self._server.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def start(self) -> None:
        """Start an engine here, and return at once. It ends at the latest when this process does."""
        self.stop()
        with self.log.open("ab") as log:
            self._guard = start_guarded(self._argv, self._environment, log)

    def stop(self, kill_after: float = 6 * GRACE_SECONDS) -> None:
        """End the engine that was started here, by force after so many seconds; others' engines are theirs."""
        if self._guard is not None:
            self._guard.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._guard.communicate(timeout=kill_after)
            send_to_group(self._guard.pid, signal.SIGKILL)
            self._guard.communicate()
        self._guard = self._server = None


def send_to_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
