"""ZeroMQ sockets with a message size limit: larger messages are dropped, and their connection is closed."""

from __future__ import annotations

from typing import Any, TypeVar

import zmq

LONGEST_MESSAGE = 16 * 1024 * 1024
"""Bytes. Calls of agents, and the KV events of one engine step, have a hundredth of that."""
S = TypeVar("S")


def bounded(socket: S, longest: int = LONGEST_MESSAGE) -> S:
    """Limit the parts of messages that ``socket`` accepts; call this before it is bound or connected."""
    options: Any = socket
    options.setsockopt(zmq.MAXMSGSIZE, longest)
    return socket
