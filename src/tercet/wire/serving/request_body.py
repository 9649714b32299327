"""A reader of HTTP requests' bodies with a limit, so that no client can make a server keep more."""

from __future__ import annotations

from typing import Protocol

from starlette.types import Message, Receive

from tercet.protocol import RequestTooLarge


class BodyTaker(Protocol):
    """A buffer of one body: it takes the pieces, and has the whole ``content`` after the end."""

    content: bytes

    def take(self, piece: bytes) -> None:
        """Keep one more piece; may raise."""
        ...

    def end(self) -> None:
        """Make ``content`` of the pieces."""
        ...


class BodyPieces:
    """A buffer of one body that no limit of several bodies applies to."""

    def __init__(self) -> None:
        self.content = b""
        self._pieces: list[bytes] = []

    def take(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def end(self) -> None:
        self.content = b"".join(self._pieces)
        self._pieces.clear()


async def read_whole(receive: Receive, announced: str, limit: int, taker: str, body: BodyTaker) -> bool:
    """Read the body of an ASGI request into ``body``; return False if its client leaves before its end.

    ``announced`` is its ``content-length``, or empty. Raises :class:`~tercet.protocol.RequestTooLarge` for more than
    ``limit`` bytes, the limit of the ``taker``.
    """
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit, taker)
    nothing: Message = {}
    size, more, message = 0, True, nothing
    try:
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return False
            size += len(message.get("body", b""))
            if size > limit:
                raise _too_large(limit, taker)
            body.take(message.get("body", b""))
            more = message.get("more_body", False)
        body.end()
        return True
    finally:
        message = nothing  # an exception refers to this frame, and may outlive it by far


def _too_large(limit: int, taker: str) -> RequestTooLarge:
    return RequestTooLarge(f"the request's body has more than {limit} bytes, the limit of {taker}")
