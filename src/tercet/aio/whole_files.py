"""Small files that other processes replace. A read sees one version, and a write is never seen in part."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_whole(path: Path, most: int | None = None) -> bytes:
    """Return the contents of a file, at most ``most`` bytes. Raise ``OSError``, also if it is not a regular file.

    A read of a pipe might never return.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
    except BaseException:
        os.close(descriptor)
        raise
    with open(descriptor, "rb") as file:
        if most is None:
            return file.read()
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"has more than {most} bytes")
    return content


def write_whole(path: Path, content: bytes, lasting: bool = False) -> None:
    """Replace a file: readers find the old content or the new one. ``lasting``: the file survives a power cut.

    Only this user can read the file. Raise ``OSError`` on failure.
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
    """Return a value that differs after each change of the file, or None if the file does not exist."""
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
