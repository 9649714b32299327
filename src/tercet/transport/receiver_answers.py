"""A receiver's messages to a sender on one connection, one by one."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from tercet.protocol import TransferFailed
from tercet.transport.peer_messages import FROM_RECEIVER, FromReceiver, MessageSplitter, ProtocolViolation, Refused

M = TypeVar("M", bound=FromReceiver)


class ReceiverAnswers:
    """A receiver's messages. Those before :meth:`read_from` must be complete within ``seconds`` in total.

    Use :meth:`expect` before that call, and :meth:`next` after it.
    """

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._sock = sock
        self._deadline: float | None = time.monotonic() + seconds
        self._on_silence = self._give_up
        self._splitter = MessageSplitter(FROM_RECEIVER)
        self._messages = self._receive()

    def read_from(self, sock: socket.socket, on_silence: Callable[[], None]) -> None:
        """Read from ``sock`` from now on.

        ``on_silence`` is called at each timeout of it, and may raise to end the wait.
        """
        self._sock, self._on_silence, self._deadline = sock, on_silence, None

    def next(self) -> FromReceiver:
        """Return the next message.

        Raises ``OSError`` when the connection ends, and :class:`ProtocolViolation` for a refusal.
        """
        message = next(self._messages)
        if isinstance(message, Refused) and message.send == 0:
            raise ProtocolViolation(message.reason)
        return message

    def expect(self, kind: type[M]) -> M:
        """Return the next message, which is a ``kind``; raise :class:`~tercet.protocol.TransferFailed` if late."""
        message = self.next()
        if not isinstance(message, kind):
            raise ProtocolViolation(f"a receiver must send {kind.__name__} here, not {type(message).__name__}")
        return message

    def _give_up(self) -> None:
        raise TransferFailed("the receiver did not answer the greeting in time")

    def _receive(self) -> Iterator[FromReceiver]:
        while True:
            if self._deadline is not None:
                left = self._deadline - time.monotonic()
                if left <= 0:
                    self._give_up()
                self._sock.settimeout(left)
            try:
                data = self._sock.recv(64 * 1024)
            except (TimeoutError, BlockingIOError):
                self._on_silence()
                continue
            if not data:
                raise ConnectionResetError("the receiver closed the connection")
            yield from self._splitter.feed(data)
