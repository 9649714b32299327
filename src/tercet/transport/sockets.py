"""What both ends do to their sockets."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

from tercet.protocol import BadRequest
from tercet.transport.frames import HEADER_BYTES, Header, ProtocolViolation, unpack
from tercet.transport.vectors import Vector

# Between processes of one machine: what is under way then stays in the processor's caches, and no link has to be kept
# full. Left alone, the kernel lets it grow to megabytes.
LOCAL_BUFFER_BYTES = 256 * 1024

# A peer that lost its power says nothing: after about a minute of silence the kernel asks, and gives up.
KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_PROBES = 30, 10, 3


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``; raises :class:`~tercet.protocol.BadRequest` if it is none."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise BadRequest(f"addresses: {address!r} is not tcp://host:port", "kv_addr_info")
    return host.removeprefix("[").removesuffix("]"), int(port)


def tune(sock: socket.socket) -> None:
    """Small frames go out at once, and a peer that vanished is noticed.

    Buffer sizes are left to the kernel, except where both ends are on this machine.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_SECONDS),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_SECONDS),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if sock.getpeername()[0] == sock.getsockname()[0]:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, LOCAL_BUFFER_BYTES)


def wait_in_calls(sock: socket.socket, send_seconds: float, receive_seconds: float) -> None:
    """From now on calls wait in the kernel, which is faster than to be told when to call again.

    One that got nowhere for so long raises ``BlockingIOError``, not Python's ``TimeoutError``.
    """
    sock.setblocking(True)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_seconds))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(receive_seconds))


def _timeval(seconds: float) -> bytes:
    whole, rest = divmod(max(1, round(seconds * 1_000_000)), 1_000_000)  # 0 would be for ever
    return struct.pack("ll", whole, rest)


def send_all(sock: socket.socket, data: Vector) -> None:
    """Send it from where it is. Raises ``TimeoutError`` when nothing went for as long as the socket waits."""
    while data.left:
        sent = data.send(sock)
        if sent is None:
            raise TimeoutError
        data.advance(sent)


def read_frame(sock: socket.socket, limit: int, on_timeout: Callable[[], None]) -> tuple[Header, bytes]:
    """A receiver's answer, with a body of at most ``limit`` bytes; ``on_timeout`` may raise to end the wait.

    Raises ``OSError`` when the connection ends, :class:`~tercet.transport.frames.ProtocolViolation` for nonsense.
    """
    header = unpack(_read_exactly(sock, HEADER_BYTES, on_timeout))
    if header.nbytes > limit:
        raise ProtocolViolation(f"{header.kind.name} of {header.nbytes} bytes")
    return header, _read_exactly(sock, header.nbytes, on_timeout)


def _read_exactly(sock: socket.socket, size: int, on_timeout: Callable[[], None]) -> bytes:
    data = b""
    while len(data) < size:
        try:
            more = sock.recv(size - len(data))
        except (TimeoutError, BlockingIOError):
            on_timeout()
            continue
        if not more:
            raise ConnectionResetError("the receiver closed the connection")
        data += more
    return data


def shut(sock: socket.socket) -> None:
    """End a connection both ways, so that whoever waits on it wakes up."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # not connected any more
