"""The built-in transport of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tercet.protocol import BadRequest
from tercet.transport.backends import AUTO, TCP, backends_for
from tercet.transport.base import OnDone, OnFinished, Target
from tercet.transport.grants import Grant, GrantTable
from tercet.transport.origin import Origin
from tercet.transport.receiver import Receiver
from tercet.transport.recut import BlockShape
from tercet.transport.region import KVRegion
from tercet.transport.rules import Rules
from tercet.transport.sender import Sender
from tercet.transport.session import MAX_STREAMS
from tercet.transport.threads import Pace

MAX_PORT = 65535


@dataclass(frozen=True)
class TransportSettings:
    """How a rank sends and receives.

    ``transport``: ``auto``, ``tcp`` or a backend's name. ``hosts``: addresses to listen on; a sender spreads its
    connections over them. ``ports``: which to try, any if empty. ``streams``: connections per peer when KV travels
    through them. ``secret``: what all ranks of a fleet must know. ``timeout``: seconds without progress after which a
    send fails. ``receive_limit``: bytes per second that are taken in at most, 0 for any number.
    """

    transport: str = AUTO
    hosts: tuple[str, ...] = ("127.0.0.1",)
    ports: tuple[int, ...] = ()
    streams: int = 2
    secret: str = ""
    timeout: float = 30.0
    receive_limit: float = 0.0

    def __post_init__(self) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` naming the setting that is wrong."""
        if not self.hosts:
            raise BadRequest("hosts: give one address to listen on at least", "hosts")
        if not all(0 < port <= MAX_PORT for port in self.ports):
            raise BadRequest(f"ports: give ports from 1 to {MAX_PORT}, or none at all", "ports")
        if not 0 < self.streams <= MAX_STREAMS:
            raise BadRequest(f"streams: {self.streams} is not from 1 to {MAX_STREAMS}", "streams")
        if not self.timeout > 0:
            raise BadRequest(f"timeout: {self.timeout} s is no time to wait", "timeout")
        if not self.receive_limit >= 0:
            raise BadRequest(f"receive_limit: {self.receive_limit} bytes/s is no limit", "receive_limit")


class RankTransport:
    """Implements :class:`~tercet.transport.KVTransport` over one rank's ``region``.

    Peers must have the same ``fingerprint``. ``on_finished(lease, valid_end)`` is called when a sender's claim was
    accepted, before it is acknowledged. With ``block``, KV can be exchanged with ranks whose blocks have another size;
    the fingerprint must not tell them apart then. Raises :class:`~tercet.transport.backends.BackendUnavailable` if the
    settings name a backend that cannot be had.
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
        self._region = region
        self._backends = backends_for(settings.transport, region, settings.hosts[0])
        self._grants = GrantTable(region.num_layers)
        tcp_allowed = settings.transport in (AUTO, TCP)
        self._rules = Rules(
            region, self._grants, fingerprint, settings.secret, on_finished, self._backends, tcp_allowed, block,
            Pace(settings.receive_limit),
        )  # fmt: skip
        offers = {backend.name: backend.offer() for backend in self._backends} | ({TCP: b""} if tcp_allowed else {})
        origin = Origin(region, fingerprint, settings.secret, settings.timeout, settings.streams, offers, block=block)
        self._sender = Sender(origin)
        try:
            self._receiver = Receiver(self._rules, settings.hosts, settings.ports)
        except BaseException:
            for backend in self._backends:
                backend.close()
            raise

    @property
    def addresses(self) -> tuple[str, ...]:
        """See :class:`~tercet.transport.KVTransport`."""
        return self._receiver.addresses

    def transport_to(self, addresses: Sequence[str]) -> str | None:
        """How KV travels to a receiver, once a session with it is agreed on."""
        return self._sender.transport_to(addresses)

    def grant(self, grant: Grant) -> None:
        """See :meth:`tercet.transport.KVTransport.grant`."""
        self._grants.grant(grant)

    def revoke(self, lease: str) -> int:
        """See :meth:`tercet.transport.KVTransport.revoke`."""
        return self._grants.revoke(lease)

    def open(self, send_id: str, target: Target, on_done: OnDone) -> None:
        """See :meth:`tercet.transport.KVTransport.open`."""
        self._sender.open(send_id, target, on_done)

    def push(self, send_id: str, layers: range, slot: int, blocks: Sequence[int]) -> None:
        """See :meth:`tercet.transport.KVTransport.push`."""
        self._sender.push(send_id, layers, slot, blocks)

    def finish(self, send_id: str, begin: int, end: int) -> None:
        """See :meth:`tercet.transport.KVTransport.finish`."""
        self._sender.finish(send_id, begin, end)

    def cancel(self, send_id: str) -> None:
        """See :meth:`tercet.transport.KVTransport.cancel`."""
        self._sender.cancel(send_id)

    def counters(self) -> Mapping[str, int]:
        """See :meth:`tercet.transport.KVTransport.counters`."""
        now = {
            "connections": self._receiver.connections,
            "sessions_in": len(self._rules.sessions),
            "sessions_out": self._sender.sessions,
            "sends_active": self._sender.active,
            "leases_open": len(self._grants),
            "receives_active": self._grants.receives,
        }
        return {**self._rules.counters.read(), **self._sender.counters.read(), **now}

    def close(self) -> None:
        """See :meth:`tercet.transport.KVTransport.close`."""
        self._sender.close()
        self._rules.pace.close()
        self._receiver.close()
        for backend in self._backends:
            backend.close()
