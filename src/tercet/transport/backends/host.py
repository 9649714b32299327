"""``host``: engines of one machine map each other's KV, and the receiver copies blocks out of it.

One copy at memory speed, and no system call for it. What keeps it safe: the file is sealed, so that it cannot shrink
under a reader; it is mapped read-only; and only the file of the process that holds the connection's other end is
opened. Were that process taken on its word, a peer could have any other engine's KV copied into blocks of its own.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from tercet.transport.backends.base import BackendUnavailable, Copies, Sender
from tercet.transport.region import WORD_BYTES, KVRegion
from tercet.transport.threads import start_thread

MADV_POPULATE_READ = 22  # Linux 5.14
# Mapped in one call, during which no other thread of this process runs: about a millisecond.
TOUCHED_AT_A_TIME = 8 * 1024 * 1024


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    pid: int
    fd: int


class HostBackend:
    """Reads regions of other processes of this machine."""

    name = "host"

    def __init__(self, region: KVRegion) -> None:
        self._region = region

    def offer(self) -> bytes:
        """See :meth:`~tercet.transport.backends.base.Backend.offer`."""
        return msgspec.msgpack.encode(_Offer(os.getpid(), self._region.fd))

    def connect(self, offer: bytes, sender: Sender) -> HostReader:
        """See :meth:`~tercet.transport.backends.base.Backend.connect`."""
        try:
            found = msgspec.msgpack.decode(offer, type=_Offer)
            if not sender.holds(found.pid):
                raise BackendUnavailable("host: the sender is not a process that this one can see on this machine")
            return HostReader(self._region.bytes, *_map(found, sender.shape.size))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise BackendUnavailable(f"host: the sender's memory cannot be mapped: {error}") from error

    def close(self) -> None:
        """Nothing is held beyond the region."""


def _map(offer: _Offer, size: int) -> tuple[mmap.mmap, list[range]]:
    """A sender's region, and where there is something in it now."""
    fd = os.open(f"/proc/{offer.pid:d}/fd/{offer.fd:d}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size != size:
            raise ValueError("it is not a sealed file of the size that the sender names")
        return mmap.mmap(fd, size, prot=mmap.PROT_READ), list(_extents(fd, size))
    finally:
        os.close(fd)


def _extents(fd: int, size: int) -> Iterator[range]:
    """Where a file has something in it, in bytes; the rest are holes."""
    end = 0
    while end < size:
        try:
            begin = os.lseek(fd, end, os.SEEK_DATA)
        except OSError:  # nothing but a hole is left
            return
        end = os.lseek(fd, begin, os.SEEK_HOLE)
        yield range(begin, end)


class HostReader:
    """See :class:`~tercet.transport.backends.base.Reader`."""

    at_a_time = 1024 * 1024

    def __init__(self, ours: memoryview, theirs: mmap.mmap, filled: Sequence[range]) -> None:
        self._ours = ours
        self._map = theirs
        self._theirs = memoryview(theirs)
        start_thread("tercet-map", _touch, theirs, filled)

    def read(self, copies: Copies) -> None:
        """See :meth:`~tercet.transport.backends.base.Reader.read`."""
        ours, theirs = self._ours, self._theirs
        for size, there, here in copies.tolist():
            ours[here : here + size] = theirs[there : there + size]

    def word(self, there: int) -> int:
        """See :meth:`~tercet.transport.backends.base.Reader.word`."""
        return int.from_bytes(self._theirs[there : there + WORD_BYTES], "little")

    def close(self) -> None:
        """Unmap."""
        self._theirs.release()
        self._map.close()


def _touch(region: mmap.mmap, filled: Sequence[range]) -> None:
    """Have pages mapped ahead, so that the first copies need not do it one by one.

    Holes are left alone: looking into one would take memory for it.
    """
    with suppress(ValueError, OSError):  # closed meanwhile; or an older kernel, and then the copies do it
        for part in filled:
            for at in range(part.start, part.stop, TOUCHED_AT_A_TIME):
                region.madvise(MADV_POPULATE_READ, at, min(TOUCHED_AT_A_TIME, part.stop - at))


def held_by(pid: int, connection: socket.socket) -> bool:
    """Whether process ``pid``, on this machine, has the other end of a TCP connection open; false if in doubt."""
    try:
        inode = _inode(connection.family, connection.getpeername(), connection.getsockname())
        if inode is None:
            return False
        with os.scandir(f"/proc/{pid:d}/fd") as entries:
            return any(_target(entry.path) == f"socket:[{inode}]" for entry in entries)
    except (OSError, ValueError):
        return False


def _inode(family: int, local: tuple[Any, ...], remote: tuple[Any, ...]) -> int | None:
    """The kernel's number of the socket with these ends, if it is in this network namespace."""
    ends = [_end(family, local), _end(family, remote)]
    with open("/proc/net/tcp6" if family == socket.AF_INET6 else "/proc/net/tcp", encoding="ascii") as table:
        for line in table:
            fields = line.split()
            if fields[1:3] == ends:
                return int(fields[9])
    return None


def _end(family: int, address: tuple[Any, ...]) -> str:
    """An address as ``/proc/net/tcp`` writes it: words in the machine's byte order, then the port."""
    packed = socket.inet_pton(family, address[0])
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""
