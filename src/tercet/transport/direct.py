"""Pieces by reference between processes of one machine: the receiver copies them out of the sender's memory.

Instead of its bytes, a piece carries an address. The receiver reads it with ``process_vm_readv`` (Linux), which saves
both ways through the kernel's sockets. Two things keep that safe:

- A greeting names a process, and offers a random word in its memory. A receiver takes references only if that process
  holds the connection's other end, and if it can read the word; otherwise bytes travel as usual. Were the process taken
  on trust, a peer could have any process's memory copied, the receiver's own included.
- Each send has a word in the sender's memory that holds its number while its blocks are pinned. It is cleared before
  they are unpinned, and the receiver reads it *after* the data: if it still matches, the data was good.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import struct
from typing import Any

import msgspec

NONCE_BYTES = 16
LIVE_WORDS = 4096
WORD_BYTES = 8


class _IOVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


_readv = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)


class Greeting(msgspec.Struct, frozen=True, array_like=True):
    """Body of HELLO: the layout's fingerprint, and where a receiver on this machine can prove that it is one."""

    fingerprint: str
    pid: int = 0
    nonce_address: int = 0
    nonce: bytes = b""


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """Body of a piece by reference: addresses of the data and of its send's live word."""

    data: int
    live: int


def address_of(view: memoryview) -> int:
    """Address of a writable buffer's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def read_process(pid: int, address: int, into: memoryview) -> None:
    """Fill ``into`` from another process's memory; raises ``OSError`` if all of it cannot be read."""
    if _readv is None:
        raise OSError("process_vm_readv is not available")
    local, remote = _IOVec(address_of(into), into.nbytes), _IOVec(address, into.nbytes)
    count = _readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if count != into.nbytes:
        number = ctypes.get_errno()
        raise OSError(number, f"reading process {pid}: {os.strerror(number) if count < 0 else 'cut short'}")


def can_read(greeting: Greeting) -> bool:
    """Whether this process can read the greeting's sender."""
    if len(greeting.nonce) != NONCE_BYTES:
        return False
    found = memoryview(bytearray(NONCE_BYTES))
    try:
        read_process(greeting.pid, greeting.nonce_address, found)
    except (OSError, OverflowError, ctypes.ArgumentError):
        return False
    return bytes(found) == greeting.nonce


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


class LiveTable:
    """A connection's words that tell which of its sends still pin their blocks.

    Numbers are not 0, and a process must not use one twice: the memory of a table that is gone may become the next
    one's, and a receiver that is late may still look there.
    """

    def __init__(self) -> None:
        self._nonce = memoryview(bytearray(secrets.token_bytes(NONCE_BYTES)))
        self._words = memoryview(bytearray(LIVE_WORDS * WORD_BYTES)).cast("Q")
        self._address = address_of(self._words.cast("B"))

    def greeting(self, fingerprint: str) -> Greeting:
        """What HELLO says."""
        return Greeting(fingerprint, os.getpid(), address_of(self._nonce), bytes(self._nonce))

    def begin(self, number: int) -> None:
        """Blocks of this send are pinned from now on."""
        self._words[number % LIVE_WORDS] = number

    def end(self, number: int) -> None:
        """They may be unpinned from now on."""
        if self._words[number % LIVE_WORDS] == number:
            self._words[number % LIVE_WORDS] = 0

    def reference(self, number: int, data: memoryview) -> Reference:
        """A reference to a piece of this send."""
        return Reference(address_of(data), self._address + number % LIVE_WORDS * WORD_BYTES)


def read_reference(pid: int, reference: Reference, number: int, into: memoryview) -> bool:
    """Copy a referenced piece into ``into``; whether its send was still live once that was done.

    Raises ``OSError`` when the sender's memory cannot be read.
    """
    read_process(pid, reference.data, into)
    word = memoryview(bytearray(WORD_BYTES))
    read_process(pid, reference.live, word)
    return word.cast("Q")[0] == number
