"""Backends: ways to read another rank's KV, chosen per pair of peers.

``auto`` uses ``host`` for peers on one machine, or ``ipc`` if KV is on devices. For other peers it uses the first of
:data:`RDMA` that works, if the machine has an RDMA device (``nixl`` reads devices, too); otherwise ``tcp``, which is
faster than the libraries are without RDMA. A name instead of ``auto`` requires that backend; an error says if it is
unavailable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tercet.protocol import BadRequest
from tercet.transport.backends.mooncake import MooncakeBackend
from tercet.transport.backends.nixl import NixlBackend, NixlDeviceBackend
from tercet.transport.backends.reading import Backend, BackendUnavailable, HostBackend, IpcBackend, has_rdma
from tercet.transport.backends.tcp import TcpBackend
from tercet.transport.region import KVRegion
from tercet.transport.staged import StagedMemory

logger = logging.getLogger(__name__)
AUTO = "auto"
# Each factory makes a backend for a region; the address is the one at which other machines reach this rank.
FACTORIES: dict[str, Callable[[KVRegion, str], Backend]] = {
    "tcp": lambda _region, _host: TcpBackend(),
    "host": lambda region, _host: HostBackend(region),
    "nixl": lambda region, _host: NixlBackend(region),
    "mooncake": MooncakeBackend,
}
# Under ``auto`` one of them is enough, since each registers the whole region.
RDMA = ("nixl", "mooncake")
TRANSPORTS = (AUTO, *FACTORIES, IpcBackend.name)


def backends_for(name: str, region: KVRegion, host: str = "127.0.0.1") -> Sequence[Backend]:
    """Return the backends that setting ``name`` allows, best first.

    Raises :class:`~tercet.protocol.BadRequest` for an unknown name, and :class:`BackendUnavailable` for a required
    backend that is unavailable. Under ``auto``, an unavailable backend is left out, and logged.
    """
    if name == AUTO:
        # Without such a device these libraries copy through sockets, more slowly than tcp does.
        rdma = RDMA if has_rdma() else ()
        # The best first: a receiver takes the first that both sides have and that passes its check.
        return (*_first_of(["host"], region, host), *_first_of(rdma, region, host), TcpBackend())
    if name == IpcBackend.name:
        raise BadRequest("transport: ipc reads KV on devices, but this engine's KV is in host memory", "transport")
    if name not in FACTORIES:
        raise BadRequest(f"transport: {name!r} is unknown; choose one of {', '.join(TRANSPORTS)}", "transport")
    return (FACTORIES[name](region, host),)


def backends_of_device(name: str, region: KVRegion, memory: StagedMemory) -> Sequence[Backend]:
    """Return the backends that setting ``name`` allows for KV that is reached through buffers, best first.

    KV is offered for direct reads if possible. Raises :class:`~tercet.protocol.BadRequest` for a transport that reads
    host memory.
    """
    if name not in TRANSPORTS:
        raise BadRequest(f"transport: {name!r} is unknown; choose one of {', '.join(TRANSPORTS)}", "transport")
    found: dict[str, Callable[[], Backend]] = {}
    if memory.device.offer:
        found[IpcBackend.name] = lambda: IpcBackend(region, memory)
    if memory.device.rdma is not None:
        found[NixlDeviceBackend.name] = lambda: NixlDeviceBackend(region, memory)
    found[TcpBackend.name] = TcpBackend
    if name == AUTO:
        return [backend for each, make in found.items() for backend in _had(each, make)]
    if name not in found:
        raise BadRequest(
            f"transport: {name} cannot read this engine's KV, which is reached through buffers; "
            f"choose {', '.join([AUTO, *found])}",
            "transport",
        )
    return (found[name](),)


def _first_of(names: Sequence[str], region: KVRegion, host: str) -> list[Backend]:
    """Return the first of these backends that is available, in a list; an empty list without one."""
    for name in names:
        if found := _had(name, lambda name=name: FACTORIES[name](region, host)):
            return found
    return []


def _had(name: str, make: Callable[[], Backend]) -> list[Backend]:
    """Return the backend in a list, or an empty list if it is unavailable."""
    try:
        return [make()]
    except BackendUnavailable as error:
        logger.warning("auto continues without %s", error.message)
    except OSError as error:
        logger.warning("auto continues without %s: %s", name, error)
    return []
