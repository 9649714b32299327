"""Fleets that run in the background: a small file for each in the cache says which process one is, while it runs."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psutil

from tercet.cluster.model import cache_root
from tercet.protocol import BadRequest
from tercet.protocol.wire import UNREADABLE

# The times of a process's start that two of its observers read.
SAME_START_SECONDS = 0.1


class DetachedFleet(msgspec.Struct, frozen=True):
    """A fleet whose front door has ``port``; ``started`` tells its process from a later one with the same ``pid``.

    ``stop_seconds`` is how long it may take to stop.
    """

    pid: int
    started: float
    port: int
    url: str
    log_dir: str
    stop_seconds: float

    @property
    def runs(self) -> bool:
        """Whether its process lives."""
        try:
            process = psutil.Process(self.pid)
            is_it = abs(process.create_time() - self.started) < SAME_START_SECONDS
            return is_it and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def own_start() -> float:
    """When this process was started, for :class:`DetachedFleet`."""
    return psutil.Process(os.getpid()).create_time()


@contextmanager
def announced(fleet: DetachedFleet) -> Generator[None]:
    """While entered, others find it."""
    file = _file(fleet.port)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = file.with_suffix(".new")
        partial.write_bytes(msgspec.json.encode(fleet))
        partial.rename(file)
    except OSError as error:
        raise BadRequest(f"--detach: {file} cannot be written: {error.strerror}", "--detach") from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def detached_fleets() -> list[DetachedFleet]:
    """Those that run, by port; what killed ones have left is taken away."""
    found: list[DetachedFleet] = []
    for file in _directory().glob("*.json"):
        fleet = _read(file)
        if fleet is not None and fleet.runs:
            found.append(fleet)
        else:
            file.unlink(missing_ok=True)
    return sorted(found, key=lambda fleet: fleet.port)


def _directory() -> Path:
    return cache_root() / "fleets"


def _file(port: int) -> Path:
    return _directory() / f"{port}.json"


def _read(file: Path) -> DetachedFleet | None:
    with suppress(FileNotFoundError, *UNREADABLE):
        return msgspec.json.decode(file.read_bytes(), type=DetachedFleet)
    return None
