"""Socket operations of both ends: addresses, options, waiting, small frames that are written at once, and I/O vectors.

Python's ``sendmsg`` and ``recvmsg_into`` take a list of buffers and look at each one, which for thousands of small
blocks takes longer than moving them. A :class:`Vector` is an array of addresses and lengths: the kernel takes it as is.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import zmq
from numpy.typing import NDArray

from tercet.protocol import BadRequest, EngineError
from tercet.protocol.names import LAST_PORT

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
        # The kernel takes no more in one call.
        message.num_places = min(len(places) - self._first, MAX_PLACES)
        while True:
            count: int = call(connection.fileno(), ctypes.addressof(message), flags)
            if count >= 0:
                return count
            number = ctypes.get_errno()
            if number == errno.EAGAIN:
                return None
            # A signal: nothing was moved, and the call is made again.
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))


def nowhere(nbytes: int, scratch: memoryview) -> Vector:
    """Return places for ``nbytes`` to be discarded: the same few bytes, repeated."""
    whole, rest = divmod(nbytes, scratch.nbytes)
    lengths = [scratch.nbytes] * whole + [rest] * (rest > 0)
    return Vector(np.array([(address_of(scratch), length) for length in lengths], dtype=np.uint64), scratch, nbytes)


UNIX, TCP = "unix-abstract:", "tcp://"
# Limit between processes of one machine: data in flight then stays in the processor's caches, and no link needs more.
# By default, the kernel lets the buffers grow to megabytes.
LOCAL_BUFFER_BYTES = 256 * 1024
# Nothing is congested between processes of one machine: packets need no timers, with which ``bbr`` spreads them.
LOCAL_CONGESTION = b"reno"
# A peer that lost its power sends no packets: after about a minute of silence the kernel probes it, and gives up.
KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_PROBES = 30, 10, 3
BACKLOG = 128
_UNIX_NAME = re.compile(UNIX + "tercet-kv-[0-9a-f]{32}")
_CREDENTIALS = struct.Struct("3i")  # process, user, group


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of ``tcp://host:port``; raise :class:`~tercet.protocol.BadRequest` for another form."""
    host, _, port = address.removeprefix(TCP).rpartition(":")
    if not address.startswith(TCP) or not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > LAST_PORT:
        raise BadRequest(f"addresses: {address!r} is not tcp://host:port", "kv_addr_info")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_address(text: str) -> bool:
    """True if a rank can have this address."""
    if text.startswith(UNIX):
        return _UNIX_NAME.fullmatch(text) is not None
    try:
        parse_address(text)
    except BadRequest:
        return False
    return not any(map(str.isspace, text))


def listen(host: str, ports: Sequence[int]) -> tuple[socket.socket, str]:
    """Listen on the first free port of ``ports``, on any port if ``ports`` is empty; return the socket and its address.

    Raises :class:`~tercet.protocol.EngineError`, which names the wrong setting.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports or (0,):
        try:
            listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                continue
            reason = error.strerror or str(error)
            raise EngineError(f"hosts: {host} is not an address of this machine to listen on: {reason}") from error
        named, port = listener.getsockname()[:2]
        return listener, f"{TCP}[{named}]:{port}" if ":" in named else f"{TCP}{named}:{port}"
    tried = f"{ports[0]} to {ports[-1]}" if ports else "the system's range"
    raise EngineError(f"ports: no port of {tried} is free on {host}; set other ports")


def listen_unix() -> tuple[socket.socket, str]:
    """Listen on a new Unix socket, which processes of this network namespace can find; return it and its address."""
    # Abstract, so that no file is left behind; random, so that no other process can have taken the name.
    name = f"tercet-kv-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind("\0" + name)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener, UNIX + name


def connect_unix(address: str, seconds: float) -> socket.socket:
    """Connect to an address that :func:`listen_unix` returned; raise ``OSError``, also if another user owns it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(seconds)
        sock.connect("\0" + address.removeprefix(UNIX))
        # Another user could listen under a name that a dead process has left.
        require_own_user(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def require_own_user(sock: socket.socket) -> None:
    """Raise ``PermissionError`` unless a process of this user made the other end of a Unix socket."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(found)
    if user != os.geteuid():
        raise PermissionError(f"process {process} belongs to user {user}, but this process to user {os.geteuid()}")


def is_local(sock: socket.socket) -> bool:
    """True if both ends of a connection are on this machine."""
    return sock.family == socket.AF_UNIX or sock.getpeername()[0] == sock.getsockname()[0]


def tune(sock: socket.socket) -> None:
    """Make a socket send small frames at once, and detect a peer that vanished.

    Buffer sizes and congestion control are left to the kernel, unless both ends are on this machine.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS),
        (socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS),
        (socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    if is_local(sock):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, LOCAL_BUFFER_BYTES)
        with suppress(OSError):  # an administrator can forbid even this one, which every kernel has
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, LOCAL_CONGESTION)


def wait_in_calls(sock: socket.socket, send_seconds: float, receive_seconds: float) -> None:
    """Make the socket's calls wait in the kernel, which is faster than polling before each call.

    A call without progress for the given time raises ``BlockingIOError``, not Python's ``TimeoutError``.
    """
    sock.setblocking(True)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_seconds))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(receive_seconds))


def _timeval(seconds: float) -> bytes:
    whole, rest = divmod(max(1, round(seconds * 1_000_000)), 1_000_000)  # 0 would mean for ever
    return struct.pack("ll", whole, rest)


def send_all(sock: socket.socket, data: Vector) -> None:
    """Send all bytes in place. Raise ``TimeoutError`` if no byte was sent within the socket's timeout."""
    while data.left:
        sent = data.send(sock)
        if sent is None:
            raise TimeoutError
        data.advance(sent)


def shut(sock: socket.socket) -> None:
    """Shut a connection down in both directions, so that a thread that waits on it wakes up."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # no longer connected


class Post:
    """Small frames on one connection, each written at once by the thread that has it.

    A thread that only wrote frames of a queue would have to wake up first, which takes longer than to write. When the
    connection accepts no more bytes, the rest waits for :meth:`deliver`. Frames are sent whole and in order;
    :meth:`send` never waits for the peer. Thread-safe.

    After :meth:`close` has returned, no more bytes are written, so the socket may be closed.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.settimeout(None)  # with a timeout, Python waits for space before its call, although the call must not wait
        self._changed = threading.Condition()
        # The part that the connection did not accept; it must be sent before all else.
        self._rest = bytearray()
        self._closed = False

    def send(self, data: bytes) -> None:
        """Write the bytes that the connection accepts at once; raise ``OSError`` if the connection has ended."""
        with self._changed:
            if self._closed:
                raise ConnectionAbortedError("the connection has ended")
            # Otherwise these bytes would overtake the rest.
            if not self._rest:
                data = data[self._write(data) :]
            if data:
                self._rest += data
                self._changed.notify()

    def deliver(self, timeout: float, moved_at: Callable[[], float]) -> None:
        """Write the rest, until :meth:`close`.

        Raises ``OSError`` if the connection has ended, and ``TimeoutError`` if it accepted no bytes for ``timeout``
        seconds while no other progress was made: ``moved_at`` returns the monotonic time of the last progress.
        """
        room = select.poll()
        room.register(self._sock, select.POLLOUT)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rest or self._closed)
                if self._closed:
                    return
            # The wait counts from here: before, there was nothing to send.
            since = time.monotonic()
            while not room.poll(max(0.0, since + timeout - time.monotonic()) * 1000):
                if moved_at() <= since:
                    raise TimeoutError
                since = moved_at()
            with self._changed:
                if self._closed:
                    return
                del self._rest[: self._write(self._rest)]

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        """Make :meth:`deliver` return; the rest stays unsent."""
        with self._changed:
            self._closed = True
            self._changed.notify()


def start_thread(name: str, target: Callable[..., Any], *args: Any) -> threading.Thread:
    """Start a daemon thread; raise ``RuntimeError`` if the system cannot start more."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    return thread


# ---- ZeroMQ ----------------------------------------------------------------------------------------------------------


# In bytes; calls of agents, and KV events of one engine step, take a hundredth of it. ZeroMQ drops a larger message,
# and closes its connection.
LONGEST_MESSAGE = 16 * 1024 * 1024
LOOPBACK = "127.0.0.1"
S = TypeVar("S")


def bounded(socket: S, longest: int = LONGEST_MESSAGE) -> S:
    """Limit the message parts that ``socket`` accepts to ``longest`` bytes; call this before bind or connect."""
    options: Any = socket
    options.setsockopt(zmq.MAXMSGSIZE, longest)
    return socket


def bind_at(socket: Any, host: str, port: int = 0) -> str:
    """Bind to a ``port`` of ``host``, an IP address; the system chooses for 0. Return the address to connect to."""
    at = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
    with_ipv6(socket, at)
    if not port:
        return f"{at}:{socket.bind_to_random_port(at)}"
    socket.bind(f"{at}:{port}")
    return f"{at}:{port}"


def with_ipv6(socket: Any, address: str) -> None:
    """Have ``socket`` take an IPv6 ``address``, which ZeroMQ else refuses."""
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
