"""What a receiver says to a sender on one connection, message by message."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from tercet.protocol import TransferFailed
from tercet.transport.peer_messages import FROM_RECEIVER, FromReceiver, ProtocolViolation, Refused, Splitter

M = TypeVar("M", bound=FromReceiver)


class ReceiverAnswers:
    """A receiver's messages; what comes before :meth:`read_from` must be complete within ``seconds``, drop by drop too.

    Use :meth:`expect` until then, and :meth:`next` from then on.
    """

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._sock = sock
        self._deadline: float | None = time.monotonic() + seconds
        self._on_silence = self._give_up
        self._splitter = Splitter(FROM_RECEIVER)
        self._messages = self._receive()

    def read_from(self, sock: socket.socket, on_silence: Callable[[], None]) -> None:
        """From now on; ``on_silence`` is called at each timeout of ``sock``, and may raise to end the wait."""
        self._sock, self._on_silence, self._deadline = sock, on_silence, None

    def next(self) -> FromReceiver:
        """Raises ``OSError`` when the connection ends, and :class:`ProtocolViolation` with what a receiver refuses."""
        message = next(self._messages)
        if isinstance(message, Refused) and message.send == 0:
            raise ProtocolViolation(message.reason)
        return message

    def expect(self, kind: type[M]) -> M:
        """The next message, of one kind; raises :class:`~tercet.protocol.TransferFailed` if it is late."""
        message = self.next()
        if not isinstance(message, kind):
            raise ProtocolViolation(f"a receiver says {kind.__name__} here, not {type(message).__name__}")
        return message

    def _give_up(self) -> None:
        raise TransferFailed("no answer to the greeting")

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
