"""aiohttp's server with limits: a head of at most 64 KiB within 10 s, a minimum rate of bodies, and timeouts.

Relies on aiohttp's ``RequestHandler``: it feeds its parser in ``data_received``; it keeps the parsed requests that have
not begun in ``_messages``, their number so far in ``_request_count``, and the running one in ``_current_request``.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from tercet.aio.incoming import LONGEST_HEAD, Breach, Incoming, Part, deadlines_of_connections
from tercet.protocol.errors import error_body
from tercet.wire.serving.answers import breach_error, last_answer

KEEPALIVE_SECONDS = 75.0
"""Idle time of a connection between two requests, in seconds; proxies keep theirs for a minute."""
LAST_SECONDS = 2.0
"""Seconds for a refused client to read the error; data that it sends in that time is dropped."""
# Bytes of a header in addition to its name and value: ": " and the line end.
BESIDE = 4


class BoundedHandler(web.RequestHandler):
    """A connection's handler that refuses long or slow heads, slow bodies, and connections without a request."""

    __slots__ = ("_ending", "_incoming", "_payload", "_refused")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._incoming: Incoming | None = None
        self._payload: Any = None
        self._refused = False
        self._ending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the deadlines of the connection. Overrides aiohttp's method."""
        super().connection_made(transport)
        self._incoming = Incoming(self, deadlines_of_connections())

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop the deadlines of the connection. Overrides aiohttp's method."""
        self._forget()
        if self._ending is not None:
            self._ending.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and check the limits. Overrides aiohttp's method."""
        incoming = self._incoming
        if incoming is None or not data:
            if not self._refused:
                super().data_received(data)
            return
        count, came = self._request_count, self._came()
        super().data_received(data)
        if self.transport is None or self.transport.is_closing() or self._upgraded:
            self._forget()
            return
        is_new = self._request_count > count
        was_body = self._payload is not None and not is_new
        if is_new:
            self._payload = self._messages[-1][1]
        progressed = is_new or self._came() != came
        part: Part = "head"
        if self._payload is not None:
            part = "body"
            if self._payload.is_eof() or self._payload.exception() is not None:
                part, progressed, self._payload = "nothing", True, None
        elif is_new or was_body:
            part = "nothing"
        incoming.fed(len(data), part, progressed)

    def _came(self) -> int:
        return 0 if self._payload is None else self._payload.total_bytes

    def is_held(self) -> bool:
        """True if this server has stopped reading, or still answers an earlier request of the connection."""
        return (
            self._reading_paused or self._buffer_paused or (self._current_request is not None and self._payload is None)
        )

    def refuse(self, breach: Breach) -> None:
        """Send the reason, if an answer can still be begun, and close the connection."""
        self._refused = True
        self._forget()
        transport: Any = self.transport
        if transport is None:
            return
        request = self._current_request
        if breach is Breach.SILENT or (request is not None and request.writer.output_size > 0):
            transport.abort()
            return
        transport.write(last_answer(breach_error(breach)))
        if request is not None:
            transport.close()  # the handler is cancelled with the connection
            return
        # If the connection were closed with unread bytes, it would be reset, and the answer would be lost.
        if transport.can_write_eof():
            transport.write_eof()
        self._ending = self._loop.call_later(LAST_SECONDS, transport.abort)

    def _forget(self) -> None:
        if self._incoming is not None:
            self._incoming.closed()
            self._incoming = None


class _BoundedServer(web.Server):
    def __call__(self) -> BoundedHandler:
        return BoundedHandler(self, loop=self._loop, **self._kwargs)


class BoundedRunner(web.AppRunner):
    """A runner of an application whose connections have limits; ``kwargs`` are those of aiohttp's ``AppRunner``."""

    def __init__(self, app: web.Application, **kwargs: Any) -> None:
        app.middlewares.insert(0, _require_short_head)
        bounds = {"max_line_size": LONGEST_HEAD, "max_field_size": LONGEST_HEAD, "keepalive_timeout": KEEPALIVE_SECONDS}
        super().__init__(app, **bounds, **kwargs)

    async def _make_server(self) -> Any:
        made: Any = await super()._make_server()
        return _BoundedServer(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )


@web.middleware
async def _require_short_head(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Limit the size of a whole head; aiohttp limits only the size of a line and the number of lines."""
    size = len(request.path_qs) + sum(len(name) + len(value) + BESIDE for name, value in request.raw_headers)
    if size <= LONGEST_HEAD:
        return await handler(request)
    error = breach_error(Breach.LONG_HEAD)
    response = web.Response(body=error_body(request.path, error), status=error.status, content_type="application/json")
    response.force_close()
    return response
