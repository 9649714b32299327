"""Fleets of ``tercet up`` on this machine: a file in the cache for each running one, and its directory of logs.

A process is identified by its id and its start time by a monotonic clock, which is never set. Each start has its own
directory of logs, which names the process that writes there; of the others only the newest are kept.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tercet.cluster.model import cache_root
from tercet.protocol import BadRequest
from tercet.protocol.wire import UNREADABLE

PROC = Path("/proc")
_BOOT = PROC / "sys/kernel/random/boot_id"
# Indices of fields in /proc/PID/stat; the field after the command's name has index 0.
_STATE, _START = 0, 19
_ENDED = frozenset("ZX")


class ProcessStart(msgspec.Struct, frozen=True):
    """A process: ``ticks`` is the time from the machine's start, whose id is ``boot``, to the process's start."""

    pid: int
    boot: str
    ticks: int

    @property
    def runs(self) -> bool:
        """True if the process runs; another process that got the same id, also after a restart, does not count."""
        fields = _fields_of(self.pid)
        return (
            fields is not None
            and fields[_STATE] not in _ENDED
            and int(fields[_START]) == self.ticks
            and boot_id() == self.boot
        )


def own_start() -> ProcessStart:
    """Return the identity of this process."""
    fields = _fields_of(os.getpid())
    return ProcessStart(os.getpid(), boot_id(), 0 if fields is None else int(fields[_START]))


def boot_id() -> str:
    """Return an id that differs at each start of the machine; empty if unknown."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def _fields_of(pid: int) -> list[str] | None:
    """Return the fields of the process's ``stat``, or None if the process has ended."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 1 :].split()  # the name before these fields may contain any character


class DetachedFleet(msgspec.Struct, frozen=True):
    """A fleet of ``tercet up``, as its record describes it to other commands."""

    # It owns the fleet, and has ended if another process has its id.
    process: ProcessStart
    # The port of its router.
    port: int
    url: str
    log_dir: str
    # Longest time that a stop takes.
    stop_seconds: float
    # Path of the process's socket, see :mod:`tercet.cluster.scaling.scaler`.
    control: str = ""
    # The fleet runs in the background.
    detached: bool = True

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def runs(self) -> bool:
        return self.process.runs


@contextmanager
def announced(fleet: DetachedFleet) -> Generator[None]:
    """Record the fleet until the block ends, so that other commands find it."""
    from tercet.aio.files import write_whole  # imports asyncio

    file = _directory() / f"{fleet.port}-{fleet.pid}.json"  # another fleet may use the same port at another address
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(file, msgspec.json.encode(fleet))
    except OSError as error:
        raise BadRequest(f"--detach: {file} cannot be written: {error.strerror}", "--detach") from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def detached_fleets() -> list[DetachedFleet]:
    """Return the fleets that run in the background, sorted by port."""
    return [fleet for fleet in running_fleets() if fleet.detached]


def running_fleets() -> list[DetachedFleet]:
    """Return all running fleets, sorted by port; remove the files of killed ones."""
    found: list[DetachedFleet] = []
    for file in _directory().glob("*.json"):
        try:
            fleet = msgspec.json.decode(file.read_bytes(), type=DetachedFleet)
        except (FileNotFoundError, *UNREADABLE):
            continue  # it was removed meanwhile, or has another version's format
        if fleet.runs:
            found.append(fleet)
        else:
            file.unlink(missing_ok=True)
    return sorted(found, key=lambda fleet: fleet.port)


def _directory() -> Path:
    return cache_root() / "fleets"


# Number of directories that are kept for ended fleets.
KEPT = 20
HOLDER = ".in-use"
_NAME = re.compile(r"\d{8}-\d{6}-\d+")


def log_directory(chosen: str | None) -> Path:
    """Create and return the ``chosen`` directory, or a new one in the cache, where old ones are then removed.

    Raises :class:`~tercet.protocol.BadRequest` if the directory is not writable.
    """
    if chosen is None:
        remove_old(cache_root() / "logs")
        place = cache_root() / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    else:
        place = Path(chosen).expanduser().absolute()
    with usable_directory(place, "log-dir"):
        if place.parent == cache_root() / "logs":
            _hold(place)
    return place


@contextmanager
def usable_directory(place: Path, setting: str) -> Generator[None]:
    """Create a directory; if that or the block fails, raise ``BadRequest``, which names the ``setting``."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(None, "the directory is not writable")
        yield
    except OSError as error:
        raise BadRequest(f"--{setting}: {place} cannot be used: {error.strerror}", setting) from error


def remove_old(logs: Path) -> None:
    """Remove old directories of ended fleets but the newest ones; directories with other names are ignored."""
    in_use = {Path(fleet.log_dir) for fleet in detached_fleets()}
    ended = [
        each
        for each in (sorted(logs.iterdir()) if logs.is_dir() else ())
        if _NAME.fullmatch(each.name) and each not in in_use and not _is_held(each)
    ]
    for old in ended[: -KEPT + 1]:
        shutil.rmtree(old, ignore_errors=True)


def _hold(place: Path) -> None:
    """Protect these logs from removal until this process ends."""
    from tercet.aio.files import write_whole  # imports asyncio

    write_whole(place / HOLDER, msgspec.json.encode(own_start()))


def _is_held(place: Path) -> bool:
    try:
        return msgspec.json.decode((place / HOLDER).read_bytes(), type=ProcessStart).runs
    except (OSError, *UNREADABLE):
        return False
