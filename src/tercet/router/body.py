"""A request's body: read whole before anything else is done, so that its size and what it asks for are known."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from tercet.protocol import RequestTooLarge

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Asked(msgspec.Struct, frozen=True):
    """What the front door itself goes by; the rest is vLLM's. Empty where the body is not what vLLM would take."""

    model: str = ""
    priority: int = 0
    user: str | None = None
    stream: Any = None


NOTHING = Asked()
_DECODER = msgspec.json.Decoder(Asked)


class Body:
    """A body that was read, for the application to receive again; ``asked`` is what it asks for.

    ``content`` is there until it has been received.
    """

    def __init__(self, content: bytes, receive: Receive) -> None:
        self.asked = _asked(content)
        self.content = content
        self._given = False
        self._receive = receive
        self._next: asyncio.Future[Message] | None = None

    async def receive(self) -> Message:
        """ASGI's ``receive``: the body, then whatever comes."""
        if not self._given:
            self._given = True
            content = self.content
            self.drop()  # vLLM has its own copy from now on
            return {"type": "http.request", "body": content, "more_body": False}
        return await (self._receive() if self._next is None else asyncio.shield(self._next))

    def drop(self) -> None:
        """Nobody needs the content any more, which may be large."""
        self.content = b""

    def left(self) -> asyncio.Future[Message]:
        """Done once the client has closed its connection."""
        self._next = self._next or asyncio.ensure_future(self._receive())
        return self._next

    def close(self) -> None:
        """Nobody waits for the client any more."""
        if self._next is not None:
            self._next.cancel()


async def read_body(scope: Scope, receive: Receive, limit: int) -> Body | None:
    """The body; None if the client left before its end. Raises :class:`~tercet.protocol.RequestTooLarge`."""
    announced = next((value for name, value in scope["headers"] if name.lower() == b"content-length"), b"")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return None
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > limit:
            raise _too_large(limit)
        more = message.get("more_body", False)
    return Body(b"".join(chunks), receive)


def _asked(content: bytes) -> Asked:
    try:
        return _DECODER.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return NOTHING


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"the request's body has more than {limit} bytes, which is all that this front door takes")
