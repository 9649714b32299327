"""Hosts and ports of this machine: URLs and free ports."""

from __future__ import annotations

import errno
import random
import socket
from typing import Any

from tercet.protocol import BadRequest
from tercet.protocol.names import host_and_port

_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
# The kernel's range for outgoing connections begins at 32768, Kubernetes' NodePorts at 30000.
_FREE = range(12_000, 30_000)
# Tests and simulations with the same seed must not choose the same ports at the same time.
_RANDOM = random.SystemRandom()
_TRIES = 10_000
_returned = set[int]()
_HOST_ERRORS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def url_of(host: str, port: int) -> str:
    """Return the URL at which this machine reaches a server that listens on ``host``."""
    return f"http://{host_and_port(_ANY.get(host, host), port)}"


def require_free(host: str, port: int, setting: str = "port") -> None:
    """Raise :class:`~tercet.protocol.BadRequest` naming ``--host`` or the port's ``setting`` if listening fails."""
    family, address = _resolve(host, port)
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        error = _bind_error(probe, address)
    if error is not None:
        flag = "host" if error.errno in _HOST_ERRORS else setting
        raise BadRequest(
            f"--{flag}: cannot listen at {host}:{port}: {_reason(error)}; choose another --{flag}", flag
        ) from error


def free_ports(host: str, count: int) -> list[int]:
    """Return free ports, each only once. Raises :class:`~tercet.protocol.BadRequest` naming ``--host``.

    The caller's process listens there seconds later. Ports are therefore random, and outside the ranges that the kernel
    gives to outgoing connections and to listeners without a port, and that Kubernetes gives to NodePorts.
    """
    family, address = _resolve(host, 0)
    found: list[int] = []
    for _ in range(_TRIES):
        port = _RANDOM.choice(_FREE)
        if port in _returned:
            continue
        with socket.socket(family) as probe:
            error = _bind_error(probe, (address[0], port, *address[2:]))
        if error is None:
            _returned.add(port)
            found.append(port)
        elif error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise BadRequest(f"--host: cannot listen at {host}: {_reason(error)}", "host") from error
        if len(found) == count:
            return found
    raise BadRequest(f"--host: {count} free ports were not found at {host}; stop processes that listen there", "host")


def _bind_error(probe: socket.socket, address: tuple[Any, ...]) -> OSError | None:
    try:
        probe.bind(address)
    except OSError as error:
        return error
    return None


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]]:
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise BadRequest(f"--host: {host!r} is not an address of this machine: {_reason(error)}", "host") from error
    family, _, _, _, address = found[0]
    return family, (str(address[0]), *address[1:])  # type: ignore[return-value]


def _reason(error: Exception) -> str:
    strerror = getattr(error, "strerror", None)
    return str(strerror or error)
