"""What belongs to one HTTP request: its headers and, when the client asked for it, the trace of its programs.

A plain ASGI middleware sets the context; the tasks that vLLM's handlers start inherit it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tercet.fleet import Trace
from tercet.protocol import TercetError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

TRACE_HEADER = "x-tercet-trace"
PROGRAM_HEADER = "x-tercet-program"
DONE = b"data: [DONE]"


@dataclass
class RequestContext:
    """One HTTP request. ``traces`` has one entry per sequence that it started (``n``, or several prompts).

    ``body`` is kept only where a rule goes by what is in it.
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    traces: list[Trace] = field(default_factory=list)
    body: list[bytes] = field(default_factory=list)

    @property
    def model(self) -> str:
        """The model's name as the client gave it; empty if it gave none, or if the body was not kept."""
        try:
            return _MODEL.decode(b"".join(self.body)).model
        except msgspec.MsgspecError:
            return ""


class _Asked(msgspec.Struct):
    model: str = ""


_MODEL = msgspec.json.Decoder(_Asked)


_current: ContextVar[RequestContext | None] = ContextVar("tercet_request", default=None)


def current() -> RequestContext:
    """The context of the HTTP request being served; an empty one outside of any."""
    return _current.get() or RequestContext()


class ContextMiddleware:
    """Refuses unknown programs, sets the context and, with ``x-tercet-trace: 1``, adds the trace to the answer.

    A stream gets one more event before ``[DONE]``, a JSON answer the key ``tercet``.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if PROGRAM_HEADER in headers:
            try:
                scope["app"].state.tercet.program_called(headers[PROGRAM_HEADER])
            except TercetError as error:
                await _refuse(error, send)
                return
        context = RequestContext(headers)
        if scope["app"].state.tercet.routing.current.plan.asks_for_models:
            receive = _keeping_body(receive, context.body)
        token = _current.set(context)
        try:
            traced = headers.get(TRACE_HEADER) == "1"
            await self._app(scope, receive, _TracingSend(send, context) if traced else send)
        finally:
            _current.reset(token)


def _keeping_body(receive: Receive, body: list[bytes]) -> Receive:
    async def keep() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            body.append(message.get("body", b""))
        return message

    return keep


async def _refuse(error: TercetError, send: Send) -> None:
    body = msgspec.json.encode(error.to_wire())
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _TracingSend:
    """Passes an answer on, with the trace added where its kind has room for it."""

    def __init__(self, send: Send, context: RequestContext) -> None:
        self._send = send
        self._context = context
        self._start: Message | None = None
        self._body = b""
        self._is_json = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._is_json = _content_type(message).startswith(b"application/json")
            self._start = message
            if not self._is_json:
                await self._send(message)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._is_json:
            await self._hold_json(message)
        else:
            body: bytes = message.get("body", b"")
            if DONE in body:
                body = body.replace(DONE, b"data: " + self._payload() + b"\n\n" + DONE)
            await self._send({**message, "body": body})

    async def _hold_json(self, message: Message) -> None:
        self._body += message.get("body", b"")
        if message.get("more_body") or self._start is None:
            return
        body = self._with_trace(self._body)
        headers = [(name, value) for name, value in self._start["headers"] if name.lower() != b"content-length"]
        await self._send({**self._start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body})

    def _with_trace(self, body: bytes) -> bytes:
        try:
            answer = msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.MsgspecError:
            return body
        return msgspec.json.encode({**answer, **msgspec.json.decode(self._payload(), type=dict[str, Any])})

    def _payload(self) -> bytes:
        traces = self._context.traces
        return msgspec.json.encode({"tercet": traces[0] if len(traces) == 1 else traces})


def _content_type(message: Message) -> bytes:
    return next((value for name, value in message["headers"] if name.lower() == b"content-type"), b"")
