"""Pushes KV to peers over TCP: sends by id, over one connection per peer.

``push`` only queues, so a slow peer stalls its own sends and nothing else.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Collection, Sequence

from tercet.protocol import BadRequest, Conflict, TercetError, TransferFailed
from tercet.transport.base import OnDone, SendReport
from tercet.transport.memory import KVMemory
from tercet.transport.peer import OutboundCounters, Outgoing, Peer

_LEASE = re.compile(r"[0-9a-f]{32}")


class TcpSender:
    """Sends by id; a connection is opened on first use and again after it broke."""

    def __init__(self, memory: KVMemory, fingerprint: str, timeout: float, cpus: Collection[int] | None = None) -> None:
        self._cpus = cpus
        self._memory = memory
        self._fingerprint = fingerprint
        self._timeout = timeout
        self._peers: dict[str, Peer] = {}
        self._sends: dict[str, tuple[Peer, Outgoing]] = {}
        # Broken, but with threads that still run; these keep the entries alive.
        self._ending: weakref.WeakSet[Peer] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = False
        self.counters = OutboundCounters()

    @property
    def active(self) -> int:
        """Sends under way."""
        return len(self._sends)

    def open(self, send_id: str, address: str, lease: str, on_done: OnDone) -> None:
        """See :meth:`tercet.transport.KVTransport.open`."""

        def done(outcome: SendReport | TercetError) -> None:
            with self._lock:
                self._sends.pop(send_id, None)
            on_done(outcome)

        fresh = None
        with self._lock:
            refusal = self._refusal(send_id, lease)
            if refusal is None:
                peer = self._peers.get(address)
                outgoing = peer.open(lease, done) if peer is not None else None
                if peer is None or outgoing is None:
                    peer, outgoing = fresh, _ = self._connect(address, lease, done)
                self._sends[send_id] = (peer, outgoing)
        if fresh is not None:
            fresh.start()
        if refusal is not None:
            self.counters.sends_failed += 1
            on_done(refusal)

    def push(self, send_id: str, layer: int, slot: int, blocks: Sequence[int]) -> None:
        """See :meth:`tercet.transport.KVTransport.push`; a send that has ended takes no more."""
        found = self._sends.get(send_id)
        if found is not None:
            found[0].push(found[1], layer, slot, blocks)

    def finish(self, send_id: str, begin: int, end: int) -> None:
        """See :meth:`tercet.transport.KVTransport.finish`."""
        found = self._sends.get(send_id)
        if found is not None:
            found[0].finish(found[1], begin, end)

    def cancel(self, send_id: str) -> None:
        """See :meth:`tercet.transport.KVTransport.cancel`."""
        found = self._sends.get(send_id)
        if found is not None:
            found[0].cancel(found[1])

    def _refusal(self, send_id: str, lease: str) -> TercetError | None:
        if self._closed:
            return TransferFailed("the transport was closed")
        if send_id in self._sends:
            return Conflict(f"send {send_id} is under way already")
        if not _LEASE.fullmatch(lease):
            return BadRequest(f"lease: {lease!r:.80} is none", "kv_addr_info")
        return None

    def _connect(self, address: str, lease: str, done: OnDone) -> tuple[Peer, Outgoing]:
        """A peer with its first send; it is to be started once the lock is free."""
        peer = Peer(
            address, self._memory, self._fingerprint, self._timeout, self.counters, self._forget, self._cpus
        )  # fmt: skip
        self._peers[address] = peer
        outgoing = peer.open(lease, done)
        assert outgoing is not None, "a connection that was not started cannot be over"
        return peer, outgoing

    def _forget(self, peer: Peer) -> None:
        with self._lock:
            if self._peers.get(peer.address) is peer:
                del self._peers[peer.address]
            self._ending.add(peer)

    def close(self) -> None:
        """End every connection; later sends fail."""
        with self._lock:
            self._closed = True
            peers = {*self._peers.values(), *self._ending}
        for peer in peers:
            peer.close()
