"""A reader of HTTP requests' bodies with a limit, so that no client can make a server keep more."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Message, Receive

from tercet.protocol import RequestTooLarge


async def read_whole(
    receive: Receive, announced: str, limit: int, taker: str, kept: Callable[[int], object] = lambda _: None
) -> bytes | None:
    """Return the body of an ASGI request; None if its client leaves before its end.

    ``announced`` is its ``content-length``, or empty. Raises :class:`~tercet.protocol.RequestTooLarge` for more than
    ``limit`` bytes, the limit of the ``taker``. ``kept`` is called with every piece's size, and may raise.
    """
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit, taker)
    chunks: list[bytes] = []
    nothing: Message = {}
    size, more, message = 0, True, nothing
    try:
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return None
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > limit:
                raise _too_large(limit, taker)
            kept(len(chunks[-1]))
            more = message.get("more_body", False)
        return b"".join(chunks)
    finally:
        # An exception refers to this frame, and may outlive it by far.
        chunks.clear()
        message = nothing


def _too_large(limit: int, taker: str) -> RequestTooLarge:
    return RequestTooLarge(f"the request's body has more than {limit} bytes, the limit of {taker}")
