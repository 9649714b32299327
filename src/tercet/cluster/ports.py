"""Hosts and ports on this machine: URLs, and free ports."""

from __future__ import annotations

import contextlib
import errno
import socket

from tercet.protocol import BadRequest
from tercet.protocol.hosts import host_and_port

_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
_HOST_ERRORS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def url_of(host: str, port: int) -> str:
    """The URL under which a server that listens on ``host`` is reached from this machine."""
    return f"http://{host_and_port(_ANY.get(host, host), port)}"


def require_free(host: str, port: int, setting: str = "port") -> None:
    """Raise :class:`~tercet.protocol.BadRequest` naming ``--host`` or the port's ``setting`` if listening fails."""
    family, address = _resolve(host, port)
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            flag = "host" if error.errno in _HOST_ERRORS else setting
            raise BadRequest(
                f"--{flag}: cannot listen at {host}:{port}: {_reason(error)}; choose another --{flag}", flag
            ) from error


def free_ports(host: str, count: int) -> list[int]:
    """Ports that are free now. Raises :class:`~tercet.protocol.BadRequest` naming ``--host``."""
    family, address = _resolve(host, 0)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(family)) for _ in range(count)]
        try:
            for each in sockets:
                each.bind(address)
        except OSError as error:
            raise BadRequest(f"--host: cannot listen at {host}: {_reason(error)}", "host") from error
        return [each.getsockname()[1] for each in sockets]


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
