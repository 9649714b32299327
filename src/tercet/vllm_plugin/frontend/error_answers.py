"""Our own errors in answers that vLLM writes: with the name of the error as code, as everywhere else.

vLLM's form is OpenAI's but for ``code``, which is the HTTP status there, a number. What is replaced has just that form:
an answer's whole body, or an event of a stream. Other APIs than OpenAI's keep the forms of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tercet.protocol import ShuttingDown, TercetError
from tercet.protocol.wire import UNREADABLE

if TYPE_CHECKING:
    from starlette.types import Message, Send

    from tercet.vllm_plugin.frontend.request_context import RequestContext

FIRST_ERROR = 400
EVENT, END = b"data: ", b"\n\n"
FORM = {"message", "type", "param", "code"}


def error_body(error: TercetError) -> bytes:
    """An error as JSON."""
    return msgspec.json.encode(error.to_wire())


def error_headers(error: TercetError) -> list[tuple[bytes, bytes]]:
    """What an answer that is this error says beside its body."""
    headers = [(b"content-type", b"application/json")]
    if error.retry_after is not None:
        headers.append((b"retry-after", str(error.retry_after).encode()))
    if isinstance(error, ShuttingDown):
        headers.append((b"connection", b"close"))  # the next request shall find another front door
    return headers


class ErrorSend:
    """Passes an answer on; once a program of ``context`` has failed, with our words in place of vLLM's."""

    def __init__(self, send: Send, context: RequestContext) -> None:
        self._send = send
        self._context = context
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        """ASGI's ``send``."""
        failed = self._context.failed
        if failed is None:
            await self._send(message)
        elif message["type"] == "http.response.start" and message["status"] >= FIRST_ERROR:
            self._start = message
        elif message["type"] == "http.response.body" and self._start is not None:
            await self._hold(message, self._start, failed)
        elif message["type"] == "http.response.body":
            await self._send({**message, "body": _event(message.get("body", b""), failed)})
        else:
            await self._send(message)

    async def _hold(self, message: Message, start: Message, failed: TercetError) -> None:
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        if _is_vllms(self._body):
            ours = error_headers(failed)
            replaced = {b"content-length", *(name for name, _ in ours)}
            kept = [(name, value) for name, value in start["headers"] if name.lower() not in replaced]
            self._body = error_body(failed)
            length = b"content-length", str(len(self._body)).encode()
            start = {**start, "headers": [*kept, *ours, length]}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": self._body})


def _event(chunk: bytes, failed: TercetError) -> bytes:
    is_event = chunk.startswith(EVENT) and chunk.endswith(END)
    return EVENT + error_body(failed) + END if is_event and _is_vllms(chunk[len(EVENT) :]) else chunk


def _is_vllms(body: bytes) -> bool:
    """Whether it is an error in vLLM's form."""
    try:
        said = msgspec.json.decode(body, type=dict[str, Any])
    except UNREADABLE:
        return False
    error = said.get("error")
    return said.keys() == {"error"} and isinstance(error, dict) and error.keys() == FORM
