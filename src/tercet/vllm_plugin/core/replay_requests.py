"""A limit for messages from other processes to vLLM's publisher of KV events: requests have a few bytes.

The publisher's replay port accepts messages of any size from every process that reaches it, and writes invalid ones
into the log in full.

Relies on ``ZmqEventPublisher`` making its sockets by ``self._ctx.socket`` in its ``_socket_setup``.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import ZmqEventPublisher

from tercet.transport.sockets import bounded
from tercet.vllm_plugin.start.patching import Method, wrap

LONGEST_REQUEST = 1024
"""Bytes of the longest message: a request is a number of 8 bytes, a subscription is a topic."""


class _Bounding:
    """A ZeroMQ context whose sockets accept short messages only."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def socket(self, kind: int) -> Any:
        """Make a socket."""
        return bounded(self._context.socket(kind), LONGEST_REQUEST)


def bound_replay_requests() -> None:
    """Make publishers of this process refuse long messages."""

    def set_up(original: Method, publisher: Any, *args: Any) -> Any:
        context = publisher._ctx
        publisher._ctx = _Bounding(context)
        try:
            return original(publisher, *args)
        finally:
            publisher._ctx = context

    wrap(ZmqEventPublisher, "_socket_setup", set_up)
