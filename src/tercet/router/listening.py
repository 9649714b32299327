"""The socket on which a router process accepts clients."""

from __future__ import annotations

import socket

from tercet.settings import RouterConfig


def listening_socket(config: RouterConfig) -> socket.socket:
    """Return a socket that is bound to the host and port for clients."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((config.host, config.port))
    return sock
