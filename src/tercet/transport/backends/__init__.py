"""Backends: ways to read another rank's KV without sockets, chosen per pair of peers.

``auto`` tries :data:`AUTO` in order and falls back to ``tcp``, where bytes travel through the connections themselves.
The names in :data:`FACTORIES` can also be asked for; what is missing is then an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from tercet.protocol import BadRequest
from tercet.transport.backends.base import Backend, BackendUnavailable, Copy, Factory, Reader, Sender
from tercet.transport.backends.host import HostBackend
from tercet.transport.region import KVRegion

TCP = "tcp"
AUTO_NAME = "auto"
FACTORIES: dict[str, Factory] = {"host": HostBackend}
AUTO = ("host",)
NAMES = (AUTO_NAME, TCP, *FACTORIES)

__all__ = [
    "AUTO_NAME",
    "NAMES",
    "TCP",
    "Backend",
    "BackendUnavailable",
    "Copy",
    "Reader",
    "Sender",
    "backends_for",
]


def backends_for(name: str, region: KVRegion) -> Sequence[Backend]:
    """The backends that setting ``name`` allows, best first; none for ``tcp``.

    Raises :class:`~tercet.protocol.BadRequest` for a name that there is not, and :class:`BackendUnavailable` for one
    that was asked for and cannot be had. Under ``auto``, what cannot be had is left out.
    """
    if name == TCP:
        return ()
    if name != AUTO_NAME:
        if name not in FACTORIES:
            raise BadRequest(f"transport: there is no {name!r}; choose {', '.join(NAMES)}", "transport")
        return (FACTORIES[name](region),)
    found: list[Backend] = []
    for candidate in AUTO:
        try:
            found.append(FACTORIES[candidate](region))
        except BackendUnavailable:
            continue
    return found
