"""The answer of a server behind a proxy to its client: unchanged, and ended with an error if it is cut off."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence
from http import HTTPStatus
from typing import Any

from tercet.protocol import TercetError
from tercet.protocol.errors import error_body, last_events
from tercet.protocol.sse import EVENTS, EventSplitter, object_of
from tercet.protocol.trace import VerbTrace
from tercet.wire.client.passing import Fields, OriginAnswer, end_to_end, first, is_encoded, passed_on
from tercet.wire.serving.answers import TracingSend
from tercet_gateway.sidecar.listener import ClientCall

logger = logging.getLogger("tercet.gateway")
JSON = "application/json"


class ProxiedAnswer:
    """One answer to a client. ``traces``, if there are any, are added to it."""

    def __init__(self, http: ClientCall) -> None:
        self.traces: Sequence[VerbTrace] = ()
        self._http = http
        self._events: EventSplitter | None = None
        self._last = b""
        self._send: Any = None
        self._reason = b""
        self._trailers: Fields = ()

    async def begin(self, upstream: OriginAnswer) -> None:
        """Send the server's status, reason and headers."""
        self._events = EventSplitter() if is_stream(upstream) else None
        self._reason = upstream.reason
        self._send = TracingSend(self._write_message, self.traces) if self.traces else self._write_message
        has_length = upstream.status != HTTPStatus.NO_CONTENT
        headers = passed_on(upstream.fields) if has_length else end_to_end(upstream.fields)
        await self._send({"type": "http.response.start", "status": upstream.status, "headers": headers})

    async def write(self, chunk: bytes) -> None:
        """Pass on a part of the server's body."""
        passed = chunk if self._events is None else b"".join(self._events.split(chunk))
        if passed:
            self._last = passed
            await self._send({"type": "http.response.body", "body": passed, "more_body": True})

    async def end(self, trailers: Fields) -> None:
        """End a complete answer."""
        rest = b"" if self._events is None else self._events.rest()
        self._trailers = trailers
        await self._send({"type": "http.response.body", "body": rest, "more_body": False})

    async def fail(self, error: TercetError, asks: Fields = ()) -> None:
        """Send an error as the answer, or at the end of a stream; cut off any other answer that has begun."""
        if not self._http.began:
            await self._http.answer(error.status, error_body(self._http.path, error), JSON, asks)
            return
        logger.warning("an answer was cut off: %s: %s", error.code, error.message)
        if self._events is not None:
            await self._http.write(last_events(self._http.path, error, object_of(self._last)))
            await self._http.end()
        else:
            self._http.abort()

    async def _write_message(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            await self._http.begin(message["status"], self._reason, message["headers"])
            return
        if body := message.get("body"):
            await self._http.write(body)
        if not message.get("more_body"):
            await self._http.end(self._trailers)


def is_stream(response: OriginAnswer) -> bool:
    """True if the answer is a stream of readable events without a length, so that a last event can be added."""
    kind = first(response.fields, b"content-type") or ""
    if not kind.lower().startswith(EVENTS) or first(response.fields, b"content-length") is not None:
        return False
    return not is_encoded(response.fields)
