"""The transport of one rank, in both directions: the interface for the agent, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping

from tercet.transport.backends import backends_for, backends_of_device
from tercet.transport.block_sizes import BlockShape
from tercet.transport.grants import GrantTable
from tercet.transport.local_rank import LocalRank, TransportSettings
from tercet.transport.memory.staged import StagedMemory
from tercet.transport.receive_traces import OnReceiveEnd
from tercet.transport.receiver import KVReceiver, OnFilled
from tercet.transport.region import KVRegion
from tercet.transport.sender import KVSender


class RankTransport:
    """The transport of one rank: it sends KV of its ``region`` (``sends``) and receives KV under leases (``grants``).

    Peers connect to ``addresses``: one for each host that it listens on, and perhaps one for peers on this machine.
    Peers must have the same ``fingerprint``. ``on_filled`` is :class:`~tercet.transport.receiver.KVReceiver`'s. With
    ``block``, KV can be exchanged with ranks whose blocks have another size; the fingerprint must then not depend on
    that size. ``staged`` is the memory of KV that lies outside of the region's host memory. Calls come from several
    threads; none of them waits for the network. Raises :class:`~tercet.transport.backends.BackendUnavailable` if the
    settings name an unavailable backend. ``on_receive_end`` is :class:`~tercet.transport.grants.GrantTable`'s.
    """

    def __init__(
        self,
        region: KVRegion,
        fingerprint: str,
        settings: TransportSettings | None = None,
        on_filled: OnFilled = lambda _lease, _end: None,
        block: BlockShape | None = None,
        staged: StagedMemory | None = None,
        on_receive_end: OnReceiveEnd = lambda _: None,
    ) -> None:
        settings = settings or TransportSettings()
        if staged is None:
            backends = backends_for(settings.transport, region, settings.hosts[0])
        else:
            backends = backends_of_device(settings.transport, region, staged)
        self._rank = LocalRank(region, fingerprint, settings, backends, block, staged)
        self.grants = GrantTable(*map(len, region.shape.group_planes), on_receive_end=on_receive_end)
        self.sends = KVSender(self._rank)
        try:
            self._receiver = KVReceiver(self._rank, self.grants, on_filled)
        except BaseException:
            self._close_backends()
            raise
        self.addresses = self._receiver.addresses

    def counters(self) -> Mapping[str, int]:
        """Return totals since the start, and current numbers."""
        return {
            **self._rank.counters.read(),
            **self._receiver.under_way(),
            **self.sends.under_way(),
            "leases_open": len(self.grants),
            "receives_active": self.grants.receives,
        }

    def close(self) -> None:
        """Stop all threads and connections."""
        self.sends.close()
        self._receiver.close()
        self._close_backends()

    def _close_backends(self) -> None:
        for backend in self._rank.backends:
            backend.close()
