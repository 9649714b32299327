"""Small files that other processes replace. A read sees one version, and a write is never seen in part."""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from pathlib import Path

MOST_NAMED = 256 * 1024 * 1024
"""Largest file of a user, in bytes, unless its reader has another limit."""
PIPE_SECONDS = 10.0
"""Seconds for all contents of a pipe to arrive."""
_PART = 64 * 1024


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


def read_named(path: Path, most: int = MOST_NAMED) -> bytes:
    """Return the contents of a file that a user names, at most ``most`` bytes; every such file is read by this.

    It may be a regular file, or a pipe such as that of a shell's ``<(command)``, whose writer has :data:`PIPE_SECONDS`.
    Raise ``OSError`` with a reason in words: for another kind of file, whose read might never end, too.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise OSError(errno.EINVAL, "is neither a file nor a pipe")
        found, size = list[bytes](), 0
        deadline = time.monotonic() + PIPE_SECONDS
        arrives = select.poll()
        arrives.register(descriptor, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            if stat.S_ISFIFO(mode) and (left <= 0 or not arrives.poll(left * 1000)):
                raise OSError(errno.ETIMEDOUT, f"is a pipe whose writer does not end within {PIPE_SECONDS:g} s")
            part = file.read(_PART if size < _PART else size)
            if not part:
                return b"".join(found)
            found.append(part)
            size += len(part)
            if size > most:
                raise OSError(errno.EFBIG, f"has more than {most} bytes")


def require_regular(path: Path) -> None:
    """Raise ``OSError`` unless a file that a library will read is a regular one: the read of a pipe may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


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
