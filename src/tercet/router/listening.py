"""The socket on which a router process accepts clients.

``tercet up`` binds it and keeps it while the router is restarted: clients that connect meanwhile wait in its queue
instead of being refused.
"""

from __future__ import annotations

import os
import socket

from tercet.settings import RouterConfig
from tercet.settings.variables import LISTENING_VARIABLE


def inherited_socket() -> socket.socket | None:
    """Return a copy of the socket that this router has inherited; None without one."""
    given = os.environ.get(LISTENING_VARIABLE)
    return None if not given else socket.socket(fileno=os.dup(int(given)))


def listening_socket(config: RouterConfig) -> socket.socket:
    """Return the socket for clients: the inherited one, or a new one that is bound to the host and port."""
    if (inherited := inherited_socket()) is not None:
        return inherited
    sock = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((config.host, config.port))
    return sock


def forget_inherited_socket() -> None:
    """Close the inherited socket: from now on, this process listens only as long as it has its copy."""
    if given := os.environ.pop(LISTENING_VARIABLE, None):
        os.close(int(given))
