"""Small files that other processes replace: read whole, and written so that no reader sees a part."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_whole(path: Path, most: int | None = None) -> bytes:
    """The contents of a file, of at most ``most`` bytes. Raises ``OSError``, also for what is not a regular file.

    A read of a pipe may never return.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if most is None:
            return file.read()
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes")
    return content


def write_whole(path: Path, content: bytes, lasting: bool = False) -> None:
    """Replace a file, so that readers find the old content or the new one. ``lasting``: it survives a power cut.

    Only this user can read it. Raises ``OSError``.
    """
    partial = Path(f"{path}.{os.getpid()}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(partial, flags, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    if lasting:
        _sync(path.parent)


def stamp_of(path: Path) -> object:
    """Differs when there is another content; None without a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _sync(place: Path) -> None:
    directory = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
