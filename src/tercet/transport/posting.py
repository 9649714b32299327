"""Small frames on one connection, written at once by whichever thread has them.

A thread that only wrote what others queue would have to wake up first, which takes longer than to write. So the callers
write; when the connection takes no more they leave the rest, and what comes after it, to :meth:`Post.deliver`.
"""

from __future__ import annotations

import select
import socket
import threading


class Post:
    """Frames go out whole and in order; :meth:`send` never waits for the peer. Thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._changed = threading.Condition()
        # What the connection did not take, and so must come before everything else.
        self._rest = bytearray()
        self._closed = False

    def send(self, data: bytes) -> None:
        """Write what goes at once; raises ``OSError`` when the connection has ended."""
        with self._changed:
            if not self._rest:
                data = data[self._write(data) :]
            if data:
                self._rest += data
                self._changed.notify()

    def deliver(self, timeout: float) -> None:
        """Write what is left over, until :meth:`close`.

        Raises ``OSError`` when the connection has ended, ``TimeoutError`` when it took nothing for ``timeout`` seconds.
        """
        room = select.poll()
        room.register(self._sock, select.POLLOUT)
        while self._has_rest():
            if not room.poll(timeout * 1000):
                raise TimeoutError
            with self._changed:
                del self._rest[: self._write(self._rest)]

    def _has_rest(self) -> bool:
        """Wait until there is some; whether there is, or all is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._rest or self._closed)
            return not self._closed

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        """:meth:`deliver` returns; what is left over stays unsent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
