"""ZeroMQ sockets that take no message of any size: a stranger's is not kept, and his connection is closed."""

from __future__ import annotations

from typing import Any, TypeVar

import zmq

LONGEST_MESSAGE = 16 * 1024 * 1024
"""Bytes. Calls of agents, and the KV events of one engine step, have a hundredth of that."""
S = TypeVar("S")


def bounded(socket: S, longest: int = LONGEST_MESSAGE) -> S:
    """``socket``, which takes parts of messages of at most so many bytes; it is neither bound nor connected yet."""
    options: Any = socket
    options.setsockopt(zmq.MAXMSGSIZE, longest)
    return socket
