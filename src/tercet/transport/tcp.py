"""The built-in transport: TCP both ways."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict

from tercet.transport.base import OnDone, OnFinished
from tercet.transport.grants import Grant, GrantTable
from tercet.transport.memory import KVMemory
from tercet.transport.receiver import TcpReceiver
from tercet.transport.sender import TcpSender


class TcpTransport:
    """Implements :class:`~tercet.transport.KVTransport` over one rank's ``memory``.

    Peers must have the same ``fingerprint``. ``timeout``: seconds without progress after which a send fails.
    ``on_finished(lease, valid_end)`` is called when a sender's claim was accepted, before it is acknowledged.
    ``cpus`` are the ones that its threads run on.
    """

    def __init__(
        self,
        memory: KVMemory,
        *,
        fingerprint: str,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout: float = 30.0,
        on_finished: OnFinished | None = None,
        cpus: Collection[int] | None = None,
    ) -> None:
        self._grants = GrantTable(memory.num_layers)
        self._receiver = TcpReceiver(
            memory, self._grants, fingerprint, host, port, on_finished or (lambda _lease, _end: None), cpus
        )
        self._sender = TcpSender(memory, fingerprint, timeout, cpus)

    @property
    def name(self) -> str:
        """The wire protocol."""
        return "tcp"

    @property
    def address(self) -> str:
        """Where peers connect."""
        return self._receiver.address

    def grant(self, grant: Grant) -> None:
        """See :meth:`tercet.transport.KVTransport.grant`."""
        self._grants.grant(grant)

    def revoke(self, lease: str) -> int:
        """See :meth:`tercet.transport.KVTransport.revoke`."""
        return self._grants.revoke(lease)

    def open(self, send_id: str, address: str, lease: str, on_done: OnDone) -> None:
        """See :meth:`tercet.transport.KVTransport.open`."""
        self._sender.open(send_id, address, lease, on_done)

    def push(self, send_id: str, layer: int, slot: int, blocks: Sequence[int]) -> None:
        """See :meth:`tercet.transport.KVTransport.push`."""
        self._sender.push(send_id, layer, slot, blocks)

    def finish(self, send_id: str, begin: int, end: int) -> None:
        """See :meth:`tercet.transport.KVTransport.finish`."""
        self._sender.finish(send_id, begin, end)

    def cancel(self, send_id: str) -> None:
        """See :meth:`tercet.transport.KVTransport.cancel`."""
        self._sender.cancel(send_id)

    def counters(self) -> Mapping[str, int]:
        """Totals since the start, and what is under way now."""
        now = {
            "connections": self._receiver.connections,
            "sends_active": self._sender.active,
            "leases_open": len(self._grants),
        }
        return {**asdict(self._receiver.counters), **asdict(self._sender.counters), **now}

    def close(self) -> None:
        """Stop every thread and connection."""
        self._sender.close()
        self._receiver.close()
