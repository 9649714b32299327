"""ZeroMQ sockets with a message size limit: larger messages are dropped, and their connection is closed."""

from __future__ import annotations

from typing import Any, TypeVar

import zmq

LONGEST_MESSAGE = 16 * 1024 * 1024
"""Bytes. Calls of agents, and the KV events of one engine step, have a hundredth of that."""
LOOPBACK = "127.0.0.1"
S = TypeVar("S")


def bounded(socket: S, longest: int = LONGEST_MESSAGE) -> S:
    """Limit the parts of messages that ``socket`` accepts; call this before it is bound or connected."""
    options: Any = socket
    options.setsockopt(zmq.MAXMSGSIZE, longest)
    return socket


def bind_somewhere(socket: Any, host: str) -> str:
    """Bind to a port of ``host``, an IP address, that the system chooses; returns the address to connect to."""
    at = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
    with_ipv6(socket, at)
    return f"{at}:{socket.bind_to_random_port(at)}"


def with_ipv6(socket: Any, address: str) -> None:
    """Have ``socket`` take an IPv6 ``address``, which ZeroMQ else refuses."""
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
