"""Separate pieces of memory for one system call: the kernel's I/O vectors.

Python's ``sendmsg`` and ``recvmsg_into`` take a list of buffers and look at each one, which for thousands of small
blocks takes longer than moving them. A :class:`Vector` is an array of addresses and lengths: the kernel takes it as is.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from typing import Any

import numpy as np
from numpy.typing import NDArray

# One row per place: its address, and its length in bytes. This is the kernel's struct iovec on 64-bit machines.
Places = NDArray[np.uint64]
PLACE_BYTES = 16
MAX_PLACES = 1024  # in one system call: UIO_MAXIOV
Buffer = bytes | bytearray | memoryview


class _Message(ctypes.Structure):
    """The kernel's struct msghdr."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint),
        ("places", ctypes.c_void_p),
        ("num_places", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_libc = ctypes.CDLL(None, use_errno=True)
# Both calls let other threads run meanwhile.
_sendmsg, _recvmsg = _libc.sendmsg, _libc.recvmsg
for _call in (_sendmsg, _recvmsg):
    _call.argtypes, _call.restype = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int], ctypes.c_ssize_t


def address_of(buffer: Buffer) -> int:
    """Return the address of a buffer that is not empty; valid as long as the buffer lives and keeps its size."""
    return np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0]


class Vector:
    """Places to send from, or to fill, in order; ``nbytes`` together. ``owners`` keep the memory alive.

    ``left`` is the number of bytes still to be sent or filled.
    """

    def __init__(self, places: Places, owners: object, nbytes: int) -> None:
        self._owners = owners
        self._places = places
        self._ends: NDArray[np.uint64] | None = None
        self._total = nbytes
        self._first = 0
        self._message = _Message()
        self.left = nbytes

    def send(self, connection: socket.socket) -> int | None:
        """Send some bytes; return their number, or None after ``SO_SNDTIMEO``. Raise ``OSError``."""
        return self._move(_sendmsg, connection, socket.MSG_NOSIGNAL)

    def receive(self, connection: socket.socket) -> int | None:
        """Fill the places by one call, which waits for all bytes; it returns less only after ``SO_RCVTIMEO``.

        Return the number of bytes, 0 at the end of the stream, None if no bytes arrived. Raise ``OSError``.
        """
        return self._move(_recvmsg, connection, socket.MSG_WAITALL)

    def advance(self, count: int) -> None:
        """Skip ``count`` bytes that were sent or filled."""
        self.left -= count
        if not self.left:
            return
        if self._ends is None:  # most vectors need one call only
            self._ends = self._places[:, 1].cumsum()
        done = self._total - self.left
        first = self._first = int(self._ends.searchsorted(done, side="right"))
        length, left = int(self._places[first, 1]), int(self._ends[first]) - done
        self._places[first, 0] += length - left
        self._places[first, 1] = left

    def _move(self, call: Any, connection: socket.socket, flags: int) -> int | None:
        message, places = self._message, self._places
        message.places = places.__array_interface__["data"][0] + PLACE_BYTES * self._first
        message.num_places = min(len(places) - self._first, MAX_PLACES)
        while True:
            count: int = call(connection.fileno(), ctypes.addressof(message), flags)
            if count >= 0:
                return count
            number = ctypes.get_errno()
            if number == errno.EAGAIN:
                return None
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))


def nowhere(nbytes: int, scratch: memoryview) -> Vector:
    """Return places for ``nbytes`` to be discarded: the same few bytes, repeated."""
    whole, rest = divmod(nbytes, scratch.nbytes)
    lengths = [scratch.nbytes] * whole + [rest] * (rest > 0)
    return Vector(np.array([(address_of(scratch), length) for length in lengths], dtype=np.uint64), scratch, nbytes)
