"""ZeroMQ sockets with a limit of message size: a larger message is dropped, and its connection is closed."""

from __future__ import annotations

from typing import Any, TypeVar

import zmq

LONGEST_MESSAGE = 16 * 1024 * 1024
"""Maximum size of a message part, in bytes.

Calls of agents, and KV events of one engine step, take a hundredth of it.
"""
LOOPBACK = "127.0.0.1"
S = TypeVar("S")


def bounded(socket: S, longest: int = LONGEST_MESSAGE) -> S:
    """Limit the message parts that ``socket`` accepts to ``longest`` bytes; call this before bind or connect."""
    options: Any = socket
    options.setsockopt(zmq.MAXMSGSIZE, longest)
    return socket


def bind_somewhere(socket: Any, host: str) -> str:
    """Bind to a port of ``host``, an IP address; the system chooses the port. Return the address to connect to."""
    at = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
    with_ipv6(socket, at)
    return f"{at}:{socket.bind_to_random_port(at)}"


def with_ipv6(socket: Any, address: str) -> None:
    """Have ``socket`` take an IPv6 ``address``, which ZeroMQ else refuses."""
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
