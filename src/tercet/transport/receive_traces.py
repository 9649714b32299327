"""Receives of KV whose senders named their place in a distributed trace: when each began and ended, and how."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from tercet.protocol import TercetError


class ReceiveEnd(msgspec.Struct, frozen=True):
    """A receive under ``lease`` is over, with ``bytes`` of KV; ``code`` and ``reason`` are those of its error.

    ``traceparent`` is its sender's place. Times are Unix times in nanoseconds.
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
    """One receive, from now on; ``bytes`` is what has arrived."""

    def __init__(self, lease: str, traceparent: str) -> None:
        self._lease, self._traceparent = lease, traceparent
        self._began = time.time_ns()
        self.bytes = 0

    def end(self, error: TercetError | None) -> ReceiveEnd:
        """It is over: all of it is in place, or it ends in an error."""
        code, reason = ("", "") if error is None else (error.code, error.message)
        return ReceiveEnd(self._lease, self._traceparent, self._began, time.time_ns(), self.bytes, code, reason)
