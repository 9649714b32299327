"""uvicorn's connection with limits: a head of at most 64 KiB within 10 s, a minimum rate of bodies, and timeouts.

httptools copies the received part of a header each time more of it arrives, so one long header costs the square of its
size: the limit is checked before the header's end. Trailers are dropped.

Relies on uvicorn's ``HttpToolsProtocol``: httptools calls its ``on_message_begin``, ``on_header``,
``on_headers_complete``, ``on_body`` and ``on_message_complete``, it has ``url``, ``headers``, ``cycle``, ``flow`` and
``transport``, and ``handle_websocket_upgrade`` gives the connection to another protocol.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tercet.aio.incoming import LONGEST_HEAD, Breach, Incoming, Part, deadlines_of_connections
from tercet.wire.serving.error_answers import breach_error, last_answer

LAST_SECONDS = 2.0
"""Seconds for a refused client to read the error; data that it sends in that time is dropped."""
# Bytes of a header in addition to its name and value: ": " and the line end.
BESIDE = 4


class BoundedProtocol(HttpToolsProtocol):
    """A protocol that refuses heads that are too long or too slow, slow bodies, and connections without a request."""

    _incoming: Incoming | None = None
    _part: Part = "nothing"
    _progressed = False
    _feeding = 0
    _refused = False
    _ending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadlines of the connection. Overrides uvicorn's method."""
        super().connection_made(transport)
        self._incoming = Incoming(self, deadlines_of_connections())

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the deadlines of the connection. Overrides uvicorn's method."""
        self._forget()
        if self._ending is not None:
            self._ending.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and check the limits. Overrides uvicorn's method."""
        incoming = self._incoming
        if incoming is None:
            if not self._refused:
                super().data_received(data)
            return
        self._progressed = False
        self._feeding = incoming.unfinished + len(data)
        super().data_received(data)
        if self._incoming is None or self.transport.is_closing():
            self._forget()
            return
        # Bytes that begin nothing, such as empty lines before a request, do not count as a request.
        part = "head" if self._part == "nothing" and not self._progressed else self._part
        incoming.fed(len(data), part, self._progressed)

    def handle_websocket_upgrade(self) -> None:
        """Stop the deadlines: the connection leaves this protocol. Overrides uvicorn's method."""
        self._forget()
        super().handle_websocket_upgrade()

    # ---- calls by the parser --------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Record that a head begins."""
        self._part = "head"
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a field to the head; drop a trailer, which uvicorn would add there after the head was checked."""
        if self._part == "head":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Record that a head is complete, and check its size."""
        self._part, self._progressed = "body", True
        if self._refused:
            return
        if self._feeding > LONGEST_HEAD and self._head_bytes() > LONGEST_HEAD:
            self.refuse(Breach.LONG_HEAD)
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Record a part of a body."""
        self._progressed = True
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Record that a request is complete."""
        self._part, self._progressed = "nothing", True
        if not self._refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Record that a request is answered; its body may not have ended."""
        if self._incoming is not None:
            self._incoming.answered()
        super().on_response_complete()

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + BESIDE for name, value in self.headers)

    # ---- refusals -------------------------------------------------------------------------------------------

    def is_held(self) -> bool:
        """True if this server has stopped reading, or still answers an earlier request of the connection."""
        cycle: Any = self.cycle
        answers = cycle is not None and not cycle.response_complete
        return self.flow.read_paused or (answers and self._part == "head")

    def refuse(self, breach: Breach) -> None:
        """Send the reason, if an answer can still be begun, and close the connection."""
        self._refused = True
        self._forget()
        cycle: Any = self.cycle
        under_way = bool(cycle) and not cycle.response_complete
        if breach is Breach.SILENT or (under_way and cycle.response_started) or self.transport.is_closing():
            self.transport.abort()
            return
        if under_way:  # the application is notified that its client has left
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.write(last_answer(breach_error(breach)))
        # If the connection were closed with unread bytes, it would be reset, and the answer would be lost.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._ending = asyncio.get_running_loop().call_later(LAST_SECONDS, self.transport.abort)

    def _forget(self) -> None:
        if self._incoming is not None:
            self._incoming.closed()
            self._incoming = None
