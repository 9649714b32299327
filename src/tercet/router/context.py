"""What belongs to one HTTP request: its headers and, when the client asked for it, the trace of its programs.

A plain ASGI middleware sets the context; the tasks that vLLM's handlers start inherit it.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from tercet.fleet import Trace
from tercet.protocol import TercetError
from tercet.router.body import NOTHING, App, Asked, Message, Receive, Scope, Send
from tercet.router.entrance import ASKED, refuse

T = TypeVar("T")
TRACE_HEADER = "x-tercet-trace"
PROGRAM_HEADER = "x-tercet-program"
DONE = b"data: [DONE]"


@dataclass
class RequestContext:
    """One HTTP request. ``traces`` has one entry per sequence that it started (``n``, or several prompts).

    ``asked`` is what its body asks for, ``began`` when it was let in, in seconds of
    :func:`time.monotonic`.
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    traces: list[Trace] = field(default_factory=list)
    asked: Asked = NOTHING
    began: float = field(default_factory=time.monotonic)


_current: ContextVar[RequestContext | None] = ContextVar("tercet_request", default=None)


def current() -> RequestContext:
    """The context of the HTTP request being served; an empty one outside of any."""
    return _current.get() or RequestContext()


@contextmanager
def held(variable: ContextVar[T | None], value: T) -> Generator[None]:
    """While entered, the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def serving_request(context: RequestContext) -> AbstractContextManager[None]:
    """While entered, this is the HTTP request being served."""
    return held(_current, context)


def headers_of(scope: Scope) -> dict[str, str]:
    """A request's headers, by their names in lower case."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


class ContextMiddleware:
    """Refuses unknown programs, sets the context and, with ``x-tercet-trace: 1``, adds the trace to the answer.

    A stream gets one more event before ``[DONE]``, a JSON answer the key ``tercet``.
    """

    def __init__(self, app: App) -> None:
        self.app = app  # by this name layers are found from outside

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = headers_of(scope)
        if PROGRAM_HEADER in headers:
            try:
                scope["app"].state.tercet.program_called(headers[PROGRAM_HEADER])
            except TercetError as error:
                await refuse(error, send)
                return
        context = RequestContext(headers, asked=scope.get(ASKED, NOTHING))
        with serving_request(context):
            traced = headers.get(TRACE_HEADER) == "1"
            await self.app(scope, receive, _TracingSend(send, context) if traced else send)


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
