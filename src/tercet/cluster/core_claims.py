"""Claims on cores by the processes of this machine; the kernel releases a claim when its process ends."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path


def claims_directory() -> Path:
    """Return the directory of the claims of all processes of this user."""
    return Path(tempfile.gettempdir()) / f"tercet-cores-{os.getuid()}"


class CoreClaims:
    """Claims of this process until its end: a file lock for each core."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or claims_directory()
        self._held: dict[int, int] = {}

    def claim(self, count: int) -> tuple[int, ...]:
        """Return ``count`` of the cores that this process may use, unclaimed cores first."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        mine = sorted(os.sched_getaffinity(0))
        free = [core for core in mine if len(self._held) < count and self._take(core)]
        taken = [core for core in mine if core not in free]
        return tuple(sorted([*free, *taken[: max(0, min(count, len(mine)) - len(free))]]))

    def release(self) -> None:
        """Release all claims."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def _take(self, core: int) -> bool:
        lock = os.open(self._directory / str(core), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._held[core] = lock
        return True
