"""Errors in answers that vLLM writes: ours in our own words, vLLM's with a name as code, as everywhere else.

vLLM's form is OpenAI's but for ``code``, which is the HTTP status there, a number. OpenAI's is text or null, and
clients that declare it so do not read a number. What is replaced has just that form: an answer's whole body, or an
event of a stream. Other APIs than OpenAI's keep the forms of their own.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from tercet.aio.incoming import Breach
from tercet.protocol import HeadTooLarge, RequestTimeout, ShuttingDown, TercetError, UnknownModel
from tercet.protocol.wire import UNREADABLE

if TYPE_CHECKING:
    from starlette.types import Message, Send

    from tercet.vllm_plugin.frontend.request_context import RequestContext

FIRST_ERROR = 400
EVENT, END = b"data: ", b"\n\n"
ERROR_EVENT = EVENT + b'{"error"'
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


def breach_error(breach: Breach) -> TercetError:
    """What a client gets whose connection was closed for this."""
    return (HeadTooLarge if breach is Breach.LONG_HEAD else RequestTimeout)(breach.value)


def last_answer(error: TercetError) -> bytes:
    """An error as the last thing that a client gets on its HTTP/1.1 connection, all of it."""
    body = error_body(error)
    lines = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode() + body


def with_named_code(body: bytes) -> bytes:
    """An error of vLLM's with its status' name as code, such as ``bad_request``; anything else as it is."""
    said = _vllms(body)
    if said is None or not isinstance(said["code"], int):
        return body
    return msgspec.json.encode({"error": {**said, "code": _name_of(said["code"], said["param"])}})


def _name_of(status: int, param: str | None) -> str:
    if status == UnknownModel.status and param == "model":
        return UnknownModel.code
    try:
        return HTTPStatus(status).name.lower()
    except ValueError:
        return str(status)


class ErrorSend:
    """Passes an answer on, errors with a name as code; once a program of ``context`` has failed, in our words."""

    def __init__(self, send: Send, context: RequestContext) -> None:
        self._send = send
        self._context = context
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        """ASGI's ``send``."""
        if message["type"] == "http.response.start" and message["status"] >= FIRST_ERROR:
            self._start = message
        elif message["type"] == "http.response.body" and self._start is not None:
            await self._hold(message, self._start)
        elif message["type"] == "http.response.body" and message.get("body", b"").startswith(ERROR_EVENT):
            await self._send({**message, "body": self._event(message["body"])})
        else:
            await self._send(message)

    async def _hold(self, message: Message, start: Message) -> None:
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        if _vllms(self._body) is not None:
            failed = self._context.failed
            ours = [] if failed is None else error_headers(failed)
            replaced = {b"content-length", *(name for name, _ in ours)}
            kept = [(name, value) for name, value in start["headers"] if name.lower() not in replaced]
            self._body = self._said(self._body)
            length = b"content-length", str(len(self._body)).encode()
            start = {**start, "headers": [*kept, *ours, length]}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": self._body})

    def _event(self, chunk: bytes) -> bytes:
        if not chunk.endswith(END):
            return chunk
        return EVENT + self._said(chunk[len(EVENT) : -len(END)]) + END

    def _said(self, error: bytes) -> bytes:
        """An error of vLLM's, in the words that clients get; anything else as it is."""
        failed = self._context.failed
        if failed is None or _vllms(error) is None:
            return with_named_code(error)
        return error_body(failed)


def _vllms(body: bytes) -> dict[str, Any] | None:
    """What an error says that is in vLLM's form."""
    try:
        said = msgspec.json.decode(body, type=dict[str, Any])
    except UNREADABLE:
        return None
    error = said.get("error")
    is_error = said.keys() == {"error"} and isinstance(error, dict) and error.keys() == FORM
    return error if is_error else None
