"""Addition of sequences' traces to their request's answer, for callers that send ``x-tercet-trace: true``.

A trace shows the addresses of engines, and how many tokens of a prompt they had in their caches because of other
clients. So callers need the rights of an administrator, unless a setting gives them to every client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tercet.protocol import BadRequest, Forbidden, TercetError
from tercet.protocol.access import BearerKeys
from tercet.protocol.headers import TRACE_HEADER
from tercet.protocol.request_checks import ShownHeaders, require_own_call
from tercet.protocol.sse import DONE, EVENTS, EventSplitter, data_of
from tercet.protocol.wire import UNREADABLE
from tercet.settings.process_settings import CLIENT_TRACES_VARIABLE

if TYPE_CHECKING:
    from starlette.types import Message, Scope, Send

_MEANS: Mapping[str, bool] = {"1": True, "true": True, "0": False, "false": False}


def wants_trace(headers: Mapping[str, str]) -> bool:
    """True if a client wants traces. Raises :class:`~tercet.protocol.BadRequest` for a header with an invalid value."""
    said = headers.get(TRACE_HEADER, "false").strip().lower()
    if said not in _MEANS:
        raise BadRequest(f"{TRACE_HEADER}: {said!r} is neither true nor false", TRACE_HEADER)
    return _MEANS[said]


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
        """Send a message, as ASGI's ``send``."""
        if message["type"] == "http.response.start":
            kind = _content_type(message).lower()
            self._is_json = kind.startswith(b"application/json")
            self._events = EventSplitter() if kind.startswith(EVENTS.encode()) else None
            self._start = message
            if not self._is_json:
                await self._send(message)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._is_json:
            await self._hold_json(message)
        elif self._events is not None:
            await self._send({**message, "body": self._stream(self._events, message)})
        else:
            await self._send(message)

    def _stream(self, events: EventSplitter, message: Message) -> bytes:
        found = events.split(message.get("body", b""))
        if not message.get("more_body"):
            found.append(events.rest())
        return b"".join(self._traced(event) if DONE in event else event for event in found)

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
        except UNREADABLE:
            return body
        return msgspec.json.encode({**answer, **msgspec.json.decode(self._payload(), type=dict[str, Any])})

    def _traced(self, event: bytes) -> bytes:
        return b"data: " + self._payload() + b"\n\n" + event if data_of(event) == DONE else event

    def _payload(self) -> bytes:
        return msgspec.json.encode({"tercet": self._traces[0] if len(self._traces) == 1 else self._traces})


def _content_type(message: Message) -> bytes:
    return next((value for name, value in message["headers"] if name.lower() == b"content-type"), b"")
