"""Bodies of HTTP requests, read up to a limit: nobody makes a server keep more than that."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Message, Receive

from tercet.protocol import RequestTooLarge


async def read_whole(
    receive: Receive, announced: str, limit: int, taker: str, kept: Callable[[int], object] = lambda _: None
) -> bytes | None:
    """The body of an ASGI request; None if its client leaves before its end.

    ``announced`` is its ``content-length``, empty where it says none. Raises
    :class:`~tercet.protocol.RequestTooLarge` for more than ``limit`` bytes, which is all that the ``taker`` takes.
    ``kept`` is told of every piece's size, and may raise.
    """
    too_large = RequestTooLarge(f"the request's body has more than {limit} bytes, which is all that {taker} takes")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
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
                raise too_large
            kept(len(chunks[-1]))
            more = message.get("more_body", False)
        return b"".join(chunks)
    finally:
        # What is raised refers to this call, and may outlive it by far.
        chunks.clear()
        message = nothing
