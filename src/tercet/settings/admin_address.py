"""The address at which a router serves its admin routes apart from clients."""

from __future__ import annotations

import msgspec

from tercet.protocol import BadRequest
from tercet.protocol.hosts import LAST_PORT

FILE_PREFIX = "unix:"
LONGEST_SOCKET_PATH = 107


class AdminAddress(msgspec.Struct, frozen=True):
    """Address at which only `/tercet/v1` is served: a ``host`` and a ``port``, or the ``path`` of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"{FILE_PREFIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def of(cls, text: str) -> AdminAddress:
        """Parse ``HOST:PORT``, ``[IPv6]:PORT`` or ``unix:PATH``; raise :class:`~tercet.protocol.BadRequest`."""
        if text.startswith(FILE_PREFIX):
            path = text.removeprefix(FILE_PREFIX)
            if path.startswith("/") and len(path.encode()) <= LONGEST_SOCKET_PATH:
                return cls(path=path)
        else:
            host, _, port = text.rpartition(":")
            bracketed = host.startswith("[") and host.endswith("]")
            bare = host[1:-1] if bracketed else host
            is_host = ":" in bare if bracketed else bool(bare) and not set(bare) & set(":[]/ ")
            if is_host and port.isascii() and port.isdigit() and 0 < int(port) <= LAST_PORT:
                return cls(bare, int(port))
        raise BadRequest(
            f"admin-listen: must be HOST:PORT, [IPv6]:PORT or unix:/PATH of at most {LONGEST_SOCKET_PATH} bytes, is "
            f"{text[:200]!r}",
            "admin-listen",
        )
