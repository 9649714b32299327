"""The transport of one rank, both ways: what the agent, tests and benchmarks use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tercet.transport.backends import backends_for
from tercet.transport.block_sizes import BlockShape
from tercet.transport.grants import Grant, GrantTable
from tercet.transport.local_rank import LocalRank, TransportSettings
from tercet.transport.peer import OnDone
from tercet.transport.receiver import KVReceiver, OnFinished
from tercet.transport.region import KVRegion
from tercet.transport.sender import KVSender, SendDestination


class RankTransport:
    """Sends KV out of one rank's ``region``, and takes KV in where leases were granted.

    Peers must have the same ``fingerprint``. ``on_finished(lease, valid_end)`` is called when all of a send is in
    place, before it is acknowledged. With ``block``, KV can be exchanged with ranks whose blocks have another size; the
    fingerprint must not tell them apart then. Calls come from several threads; none of them waits for the network.
    Raises :class:`~tercet.transport.backends.BackendUnavailable` if the settings name a backend that cannot be had.
    """

    def __init__(
        self,
        region: KVRegion,
        fingerprint: str,
        settings: TransportSettings | None = None,
        on_finished: OnFinished = lambda _lease, _end: None,
        block: BlockShape | None = None,
    ) -> None:
        settings = settings or TransportSettings()
        backends = backends_for(settings.transport, region, settings.hosts[0])
        self._rank = LocalRank(region, fingerprint, settings, backends, block)
        self._grants = GrantTable(region.num_layers)
        self._sender = KVSender(self._rank)
        try:
            self._receiver = KVReceiver(self._rank, self._grants, on_finished)
        except BaseException:
            self._close_backends()
            raise

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where peers connect: one for each host that it listens on, and perhaps one for peers on this machine."""
        return self._receiver.addresses

    def transport_to(self, addresses: Sequence[str]) -> str | None:
        """How KV travels to a receiver, once a session with it is agreed on."""
        return self._sender.transport_to(addresses)

    def grant(self, grant: Grant) -> None:
        """Let peers' KV be written under a lease; raises :class:`~tercet.protocol.Conflict` for one that was in use."""
        self._grants.grant(grant)

    def revoke(self, lease: str) -> int:
        """End a lease; once this returns no byte is written under it. Returns the end of its valid KV (tokens).

        Raises :class:`~tercet.protocol.UnknownSequence` for a lease that is not open.
        """
        return self._grants.revoke(lease)

    def open(self, send_id: str, lease: str, destinations: Sequence[SendDestination], on_done: OnDone) -> None:
        """Begin a send, to each of ``destinations``; one that was cancelled before is forgotten instead.

        ``on_done`` is called exactly once, when all of them have it or one failed, also for wrong input, with nothing
        of the transport locked; mostly from another thread, but perhaps before a call for this send returns. What is
        read of the send's KV from then on is not taken.
        """
        self._sender.open(send_id, lease, destinations, on_done)

    def push(self, send_id: str, layers: range, slot: int, blocks: Sequence[int]) -> None:
        """Offer ``blocks`` of every one of ``layers``, which are neighbours, for the receiver's slots from ``slot`` on.

        The KV must stay as it is until the send has ended.
        """
        self._sender.push(send_id, layers, slot, blocks)

    def finish(self, send_id: str, begin: int, end: int) -> None:
        """Say that the KV of tokens ``[begin, end)`` is complete."""
        self._sender.finish(send_id, begin, end)

    def cancel(self, send_id: str) -> None:
        """End a send, also one that has not begun; once this returns, nobody takes what is read of its KV."""
        self._sender.cancel(send_id)

    def counters(self) -> Mapping[str, int]:
        """Totals since the start, and what is under way."""
        return {
            **self._rank.counters.read(),
            "connections": self._receiver.connections,
            "sessions_in": self._receiver.sessions,
            "sessions_out": self._sender.sessions,
            "sends_active": self._sender.active,
            "leases_open": len(self._grants),
            "receives_active": self._grants.receives,
        }

    def close(self) -> None:
        """Stop every thread and connection."""
        self._sender.close()
        self._receiver.close()
        self._close_backends()

    def _close_backends(self) -> None:
        for backend in self._rank.backends:
            backend.close()
