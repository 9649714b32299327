"""Backends: ways to read another rank's KV, chosen per pair of peers.

``auto`` takes ``host`` for peers on one machine; for others, where there is an RDMA device, the first of :data:`RDMA`
that works; and ``tcp`` for what is left: without RDMA that is faster than the libraries are. A name instead of ``auto``
insists on that one; what is missing is then an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tercet.protocol import BadRequest
from tercet.transport.backends.host import HostBackend
from tercet.transport.backends.mooncake import MooncakeBackend
from tercet.transport.backends.nixl import NixlBackend
from tercet.transport.backends.reading import Backend, BackendUnavailable
from tercet.transport.backends.registered import has_rdma
from tercet.transport.backends.tcp import TcpBackend
from tercet.transport.region import KVRegion

logger = logging.getLogger(__name__)
AUTO = "auto"
# Each makes a backend for a region; the address is the one by which other machines reach this rank.
FACTORIES: dict[str, Callable[[KVRegion, str], Backend]] = {
    "tcp": lambda _region, _host: TcpBackend(),
    "host": lambda region, _host: HostBackend(region),
    "nixl": lambda region, _host: NixlBackend(region),
    "mooncake": MooncakeBackend,
}
# Under ``auto`` one of them is enough, for each registers the whole region.
RDMA = ("nixl", "mooncake")
TRANSPORTS = (AUTO, *FACTORIES)


def backends_for(name: str, region: KVRegion, host: str = "127.0.0.1") -> Sequence[Backend]:
    """The backends that setting ``name`` allows, best first.

    Raises :class:`~tercet.protocol.BadRequest` for a name that there is not, and :class:`BackendUnavailable` for one
    that was asked for and cannot be had. Under ``auto``, what cannot be had is left out, and logged.
    """
    if name == AUTO:
        rdma = RDMA if has_rdma() else ()
        return (*_first_of(["host"], region, host), *_first_of(rdma, region, host), TcpBackend())
    if name not in FACTORIES:
        raise BadRequest(f"transport: there is no {name!r}; choose {', '.join(TRANSPORTS)}", "transport")
    return (FACTORIES[name](region, host),)


def backends_through_buffers(name: str) -> Sequence[Backend]:
    """As :func:`backends_for`, for KV that is reached through buffers only: peers cannot read it by themselves.

    Raises :class:`~tercet.protocol.BadRequest` for a transport that would have them do so.
    """
    if name not in TRANSPORTS:
        raise BadRequest(f"transport: there is no {name!r}; choose {', '.join(TRANSPORTS)}", "transport")
    if name not in (AUTO, TcpBackend.name):
        raise BadRequest(
            f"transport: {name} reads KV where it lies, and this engine's is reached through buffers; "
            f"choose {AUTO} or {TcpBackend.name}",
            "transport",
        )
    return (TcpBackend(),)


def _first_of(names: Sequence[str], region: KVRegion, host: str) -> list[Backend]:
    """The first of these backends that can be had, if any."""
    for name in names:
        try:
            return [FACTORIES[name](region, host)]
        except BackendUnavailable as error:
            logger.warning("auto goes on without %s", error.message)
        except OSError as error:
            logger.warning("auto goes on without %s: %s", name, error)
    return []
