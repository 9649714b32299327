"""Traces of receives whose senders sent their place in a distributed trace: start, end, and result of each."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from tercet.protocol import TercetError


class ReceiveEnd(msgspec.Struct, frozen=True):
    """The end of a receive of ``bytes`` of KV under ``lease``; ``code`` and ``reason`` of its error, or empty.

    ``traceparent`` is the sender's place. Times are Unix times in nanoseconds.
    """

    lease: str
    traceparent: str
    began_ns: int
    ended_ns: int
    bytes: int
    code: str = ""
    reason: str = ""


OnReceiveEnd = Callable[[ReceiveEnd], None]


class ReceiveTrace:
    """One receive that begins now; ``bytes`` counts the bytes that have arrived."""

    def __init__(self, lease: str, traceparent: str) -> None:
        self._lease, self._traceparent = lease, traceparent
        self._began = time.time_ns()
        self.bytes = 0

    def end(self, error: TercetError | None) -> ReceiveEnd:
        """Return the record of the receive's end: complete, or failed with ``error``."""
        code, reason = ("", "") if error is None else (error.code, error.message)
        return ReceiveEnd(self._lease, self._traceparent, self._began, time.time_ns(), self.bytes, code, reason)
