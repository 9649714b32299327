"""Changes of answers on their way to the client: errors in its API's form, traces, and the detection of tool calls.

Each is an ASGI ``send`` around the server's own. vLLM's form of errors is OpenAI's except for ``code``, which is the
HTTP status there, a number. In OpenAI's form it is text or null, and typed clients cannot read a number. Layers below
vLLM's have other forms (``{"detail": ...}``, plain text). An answer's whole body is replaced, or an event of a stream;
a stream that fails gets a last event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import msgspec

from tercet.aio.incoming import Breach
from tercet.protocol import (
    BadRequest,
    Forbidden,
    HeadTooLarge,
    RequestTimeout,
    RouterFailed,
    ShuttingDown,
    TercetError,
    UnknownModel,
)
from tercet.protocol.errors import api_of, error_body, in_form, last_events
from tercet.protocol.headers import TRACE_HEADER
from tercet.protocol.json_text import NO_TEXT
from tercet.protocol.sse import DONE, EVENTS, EventSplitter, data_of, object_of
from tercet.protocol.wire import UNREADABLE
from tercet.settings.process_settings import CLIENT_TRACES_VARIABLE
from tercet.wire.callers import CHALLENGE_HEADER, BearerKeys, ShownHeaders, require_own_call

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from tercet.wire.serving.server_access import RequestContext


# ---- Errors ----------------------------------------------------------------------------------------------------------


FIRST_ERROR = 400
# This text is in every error event, of any API.
ERROR_MARK = b'"error"'
JSON, TEXT = b"application/json", b"text/plain"
_STATUSES: Mapping[int, HTTPStatus] = {status.value: status for status in HTTPStatus}
LONGEST_TEXT = 1000


async def until_left(receive: Receive) -> None:
    """Wait until the client has closed its connection; its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def error_headers(error: TercetError) -> list[tuple[bytes, bytes]]:
    """Return the headers of an error answer."""
    headers = [(b"content-type", JSON)]
    if error.retry_after is not None:
        headers.append((b"retry-after", str(error.retry_after).encode()))
    if error.challenge is not None:
        headers.append((CHALLENGE_HEADER.encode(), error.challenge.encode()))
    if isinstance(error, ShuttingDown):
        headers.append((b"connection", b"close"))  # the next request must find another router
    return headers


def breach_error(breach: Breach) -> TercetError:
    """Return the error for a client whose connection is closed because of this breach."""
    return (HeadTooLarge if breach is Breach.LONG_HEAD else RequestTimeout)(breach.value)


def fault_of(error: BaseException) -> TercetError:
    """Return the error that a client gets for an exception of vLLM's layers.

    The request is at fault if the exception is about text that cannot be encoded; otherwise the router is.
    """
    seen: list[BaseException] = [error]
    # The list grows while it is read: causes of causes, each once.
    for each in seen:
        if isinstance(each, UnicodeEncodeError):
            return BadRequest(f"the request {NO_TEXT}, in JSON inside one of its strings")
        causes = [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            causes += cast("BaseExceptionGroup[BaseException]", each).exceptions
        seen += [cause for cause in causes if cause is not None and cause not in seen]
    return RouterFailed("the router failed while it served this request; its log says how")


def last_answer(error: TercetError) -> bytes:
    """Return an error as the last answer on a client's HTTP/1.1 connection, with head and body."""
    body = error_body("", error)
    lines = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode() + body


def with_named_code(body: bytes) -> bytes:
    """Return an error of vLLM with the name of its status as code, such as ``bad_request``; other bodies unchanged."""
    error = _object(body).get("error")
    fields = cast("dict[str, Any]", error) if isinstance(error, dict) else {}
    if "message" not in fields or not isinstance(code := fields.get("code"), int):
        return body
    return msgspec.json.encode({"error": _completed(fields, code)})


def _completed(fields: Mapping[str, Any], status: int) -> dict[str, Any]:
    """Return vLLM's error with all fields of OpenAI's form."""
    param, code = fields.get("param"), fields.get("code")
    if not isinstance(code, str):
        number = code if isinstance(code, int) else status
        known = _STATUSES.get(number)
        code = known.name.lower() if known is not None else str(number)
        if number == UnknownModel.status and param == "model":
            code = UnknownModel.code
    kind = fields.get("type") or (_STATUSES[status].phrase if status in _STATUSES else str(status))
    return {"message": str(fields.get("message", "")), "type": kind, "param": param, "code": code}


def _object(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except UNREADABLE:
        return {}


class ErrorSend:
    """An ASGI ``send`` that passes an answer on, with errors in the form of the path's API.

    Once a program of ``context`` has failed, the error is the program's. ``began`` is True if the client has a part of
    the answer, ``ended`` if it has all.
    """

    def __init__(self, send: Send, context: RequestContext) -> None:
        self.began = self.ended = False
        self._send = send
        self._context = context
        self._api = api_of(context.path)
        self._start: Message | None = None
        self._body = b""
        self._events: EventSplitter | None = None
        self._opening = self._last = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if message["status"] >= FIRST_ERROR:
                self._start = message
                return
            kind = _header(message, b"content-type")
            self._events = EventSplitter() if kind.startswith(EVENTS.encode()) else None
            self.began = True
        elif message["type"] == "http.response.body":
            if self._start is not None:
                await self._hold(message, self._start)
                return
            self.ended = not message.get("more_body")
            if self._events is not None:
                message = {**message, "body": self._stream(self._events, message.get("body", b""))}
        await self._send(message)

    async def fail(self, error: TercetError) -> None:
        """Answer with this error, or end the answer with it: the application has failed. Call this at most once."""
        if not self.began:
            start: Message = {"type": "http.response.start", "status": error.status, "headers": []}
            self._start, self._body = start, b""
            await self._answer(start, error_body(self._context.path, error), error_headers(error))
        elif self._events is not None and not self.ended:
            before = {**object_of(self._last)}
            # Events between the first and the last one do not repeat the response.
            if "response" not in before and (response := object_of(self._opening).get("response")) is not None:
                before["response"] = response
            end = last_events(self._context.path, error, before)
            self.ended = True
            await self._send({"type": "http.response.body", "body": end})

    # ---- whole answers ---------------------------------------------------------------------------------------

    async def _hold(self, message: Message, start: Message) -> None:
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        failed, status, error = self._context.failed, start["status"], None
        found = _object(self._body)
        detail = found.get("error")
        text = next((found[name] for name in ("error", "detail", "message") if found.get(name)), None)
        if self._body and _header(start, b"content-type").startswith(TEXT):
            error = _completed({"message": self._body[:LONGEST_TEXT].decode(errors="replace")}, status)
        elif isinstance(detail, dict) and "message" in detail:
            error = _completed(cast("dict[str, Any]", detail), status)
        elif isinstance(text, str):
            error = _completed({"message": text}, status)
        elif text is not None and "detail" in found:  # of a validation: a list of what is wrong
            error = _completed({"message": msgspec.json.encode(text).decode()}, status)
        if error is None:  # a form that is not known stays as it is
            await self._answer(start, self._body, [])
        elif failed is not None:
            start = {**start, "status": failed.status}
            await self._answer(start, error_body(self._context.path, failed), error_headers(failed))
        else:
            await self._answer(start, in_form(self._context.path, status, error), [(b"content-type", JSON)])

    async def _answer(self, start: Message, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        replaced = {b"content-length", *(name for name, _ in headers)}
        kept = [(name, value) for name, value in start["headers"] if name.lower() not in replaced]
        length = b"content-length", str(len(body)).encode()
        self.began = self.ended = True
        await self._send({**start, "headers": [*kept, *headers, length]})
        await self._send({"type": "http.response.body", "body": body})

    # ---- streams ---------------------------------------------------------------------------------------------

    def _stream(self, events: EventSplitter, chunk: bytes) -> bytes:
        found = events.split(chunk)
        if self.ended:
            found.append(events.rest())
        if self._api == "responses" and (whole := b"".join(found)):
            self._opening = self._opening or whole
            self._last = whole
        return b"".join(self._event(event) if ERROR_MARK in event else event for event in found)

    def _event(self, event: bytes) -> bytes:
        """Return an error event with the program's error, or with OpenAI's code; any other event unchanged."""
        fields = object_of(event)
        error, failed = fields.get("error"), self._context.failed
        if self._api == "anthropic" and fields.get("type") == "error" and isinstance(error, dict):
            if failed is not None:
                return last_events(self._context.path, failed)
            # vLLM's converter only reports that it could not convert the error of the underlying chat answer.
            inner = self._context.stream_error or cast("dict[str, Any]", error)
            code = inner.get("code")
            status = code if isinstance(code, int) else HTTPStatus.INTERNAL_SERVER_ERROR
            body = in_form(self._context.path, status, {"message": str(inner.get("message", ""))})
            return b"event: error\ndata: %b\n\n" % body
        if self._api == "openai" and fields.keys() == {"error"} and isinstance(error, dict):
            status = failed.status if failed is not None else HTTPStatus.INTERNAL_SERVER_ERROR
            own = failed.to_wire()["error"] if failed is not None else _completed(cast("Any", error), status)
            return b"data: " + msgspec.json.encode({"error": own}) + b"\n\n"
        return event


def _header(message: Message, wanted: bytes) -> bytes:
    return next((value for name, value in message["headers"] if name.lower() == wanted), b"")


# ---- Traces ----------------------------------------------------------------------------------------------------------


_MEANS: Mapping[str, bool] = {"1": True, "true": True, "0": False, "false": False}


def wants_trace(headers: Mapping[str, str]) -> bool:
    """True if a client wants traces. Raises :class:`~tercet.protocol.BadRequest` for a header with an invalid value."""
    value = headers.get(TRACE_HEADER, "false").strip().lower()
    if value not in _MEANS:
        raise BadRequest(f"{TRACE_HEADER}: {value!r} is neither true nor false", TRACE_HEADER)
    return _MEANS[value]


def trace_refused(path_to_it: str) -> Forbidden:
    """Return the error for a caller who may not see traces; ``path_to_it`` says how an administrator shows that."""
    return Forbidden(
        f"{TRACE_HEADER}: a trace shows what prompts of others engines have cached, so it is for administrators; "
        f"{path_to_it}, or let every client see traces with --client-traces ({CLIENT_TRACES_VARIABLE}=1)",
        TRACE_HEADER,
    )


def require_trace_reader(scope: Scope, secrets: BearerKeys, is_keyed: bool = False) -> None:
    """Raise :class:`~tercet.protocol.Forbidden` for a caller who may not see traces of this engine.

    It must show one of the fleet's ``secrets``; if the engine ``is_keyed`` with none of them, no caller may. Without a
    key, callers of this machine may.
    """
    shown = ShownHeaders.of_asgi(scope["headers"])
    if secrets.fits("".join(shown.all("authorization"))):
        return
    if secrets or is_keyed:
        raise trace_refused("send the fleet's secret in Authorization")
    client = scope.get("client")
    try:
        require_own_call(shown, None if client is None else client[0])
    except TercetError as refusal:
        raise trace_refused("call this engine from its own machine") from refusal


class TracingSend:
    """An ASGI ``send`` that adds traces: as an event before ``[DONE]`` in a stream, as the key ``tercet`` in JSON."""

    def __init__(self, send: Send, traces: Sequence[Any]) -> None:
        self._send = send
        self._traces = traces
        self._start: Message | None = None
        self._body = b""
        self._is_json = False
        self._events: EventSplitter | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = _header(message, b"content-type").lower()
            self._is_json = kind.startswith(b"application/json")
            self._events = EventSplitter() if kind.startswith(EVENTS.encode()) else None
            self._start = message
            if not self._is_json:
                await self._send(message)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._is_json:
            self._body += message.get("body", b"")
            if message.get("more_body") or self._start is None:
                return  # the answer's length changes with the trace, so its head waits for the whole body
            body = self._body
            try:
                answer = msgspec.json.decode(body, type=dict[str, Any])
            except UNREADABLE:
                pass  # it stays as it is: a trace has no place there
            else:
                body = msgspec.json.encode({**answer, **msgspec.json.decode(self._payload(), type=dict[str, Any])})
            headers = [(name, value) for name, value in self._start["headers"] if name.lower() != b"content-length"]
            await self._send({**self._start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
            await self._send({"type": "http.response.body", "body": body})
        elif self._events is not None:
            await self._send({**message, "body": self._stream(self._events, message)})
        else:
            await self._send(message)

    def _stream(self, events: EventSplitter, message: Message) -> bytes:
        found = events.split(message.get("body", b""))
        if not message.get("more_body"):
            found.append(events.rest())
        return b"".join(
            (b"data: " + self._payload() + b"\n\n" + event if data_of(event) == DONE else event)
            if DONE in event
            else event
            for event in found
        )

    def _payload(self) -> bytes:
        return msgspec.json.encode({"tercet": self._traces[0] if len(self._traces) == 1 else self._traces})


# ---- Tool calls ------------------------------------------------------------------------------------------------------


# Marks of tool calls in chat, Anthropic's messages and responses. In JSON, quotes within a text are escaped: text that
# a model generates cannot contain these marks.
MARKS = (b'"tool_calls":[{', b'"stop_reason":"tool_use"', b'"type":"function_call"')


class ToolCallsSend:
    """An ASGI ``send`` that passes an answer on, and records in its ``context`` that it calls a tool.

    Each event is in one message.
    """

    def __init__(self, send: Send, context: RequestContext) -> None:
        self._send = send
        self._context = context

    async def __call__(self, message: Message) -> None:
        body = message.get("body", b"")
        if body and not self._context.calls_tool:
            self._context.calls_tool = any(mark in body for mark in MARKS)
        await self._send(message)
