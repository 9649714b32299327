"""Directories of fleets' logs: each start has one in the cache, and only the newest are kept."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from tercet.cluster.detached_fleets import detached_fleets
from tercet.cluster.model import cache_root
from tercet.protocol import BadRequest

# Number of directories that are kept for ended fleets.
KEPT = 20
LOCK = ".in-use"
_NAME = re.compile(r"\d{8}-\d{6}-\d+")
_held: list[int] = []


def log_directory(chosen: str | None) -> Path:
    """Create and return the ``chosen`` directory, or a new one in the cache, where old ones are then removed.

    Raises :class:`~tercet.protocol.BadRequest` if the directory is not writable.
    """
    if chosen is None:
        remove_old(cache_root() / "logs")
        place = cache_root() / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    else:
        place = Path(chosen).expanduser().absolute()
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(None, "the directory is not writable")
        if place.parent == cache_root() / "logs":
            _hold(place)
    except OSError as error:
        raise BadRequest(f"--log-dir: {place} cannot be used: {error.strerror}", "log-dir") from error
    return place


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
    """Protect these logs from removal until this process ends, by a file lock that the kernel then releases."""
    lock = os.open(place / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _held.append(lock)
    with suppress(OSError):  # some file systems have no locks
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _is_held(place: Path) -> bool:
    try:
        lock = os.open(place / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False
