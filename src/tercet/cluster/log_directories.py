"""Where the logs of fleets go: a directory for each start in the cache, of which the newest are kept."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import psutil

from tercet.cluster.detached_fleets import detached_fleets
from tercet.cluster.model import cache_root
from tercet.protocol import BadRequest

# Of fleets that have ended.
KEPT = 20
# By which the times of a process and of a file may differ.
_SLACK_SECONDS = 60.0
_NAME = re.compile(r"\d{8}-\d{6}-(\d+)")


def log_directory(chosen: str | None) -> Path:
    """The one that was ``chosen``, or a new one in the cache, where old ones are then removed; made if need be.

    Raises :class:`~tercet.protocol.BadRequest` if nothing can be written there.
    """
    if chosen is None:
        remove_old(cache_root() / "logs")
        place = cache_root() / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    else:
        place = Path(chosen).expanduser().absolute()
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(None, "it is not writable")
    except OSError as error:
        raise BadRequest(f"--log-dir: {place} cannot be used: {error.strerror}", "log-dir") from error
    return place


def remove_old(logs: Path) -> None:
    """Keep the newest of those that no fleet writes to any more; what is called otherwise is somebody else's."""
    in_use = {Path(fleet.log_dir) for fleet in detached_fleets()}
    ended = [
        each
        for each in (sorted(logs.iterdir()) if logs.is_dir() else ())
        if (name := _NAME.fullmatch(each.name)) and each not in in_use and not _may_write(int(name[1]), each)
    ]
    for old in ended[: -KEPT + 1]:
        shutil.rmtree(old, ignore_errors=True)


def _may_write(pid: int, logs: Path) -> bool:
    """Whether the process of this id may be the one that began these logs: in containers all have the same ids."""
    try:
        return psutil.Process(pid).create_time() <= logs.stat().st_mtime + _SLACK_SECONDS
    except (psutil.NoSuchProcess, OSError):
        return False
