"""Sends by id, over one session per receiver.

``push`` only queues, so a slow peer stalls its own sends and nothing else.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Sequence

from tercet.protocol import BadRequest, Conflict, TercetError, TransferFailed
from tercet.transport.base import OnDone, SendReport, Target
from tercet.transport.origin import Origin
from tercet.transport.outgoing import OutboundCounters, Outgoing
from tercet.transport.peer import Peer

_LEASE = re.compile(r"[0-9a-f]{32}")


class Sender:
    """Sends by id; a session is opened on first use and again after it broke."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._peers: dict[tuple[str, ...], Peer] = {}
        self._sends: dict[str, tuple[Peer, Outgoing]] = {}
        # Broken, but with threads that still run; these keep the entries alive.
        self._ending: weakref.WeakSet[Peer] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def active(self) -> int:
        """Sends under way."""
        return len(self._sends)

    @property
    def sessions(self) -> int:
        """Sessions with receivers."""
        return len(self._peers)

    @property
    def counters(self) -> OutboundCounters:
        """What was sent."""
        return self._origin.counters

    def transport_to(self, addresses: Sequence[str]) -> str | None:
        """How KV travels to a receiver, if there is a session with it."""
        peer = self._peers.get(tuple(addresses))
        return peer.transport if peer is not None else None

    def open(self, send_id: str, target: Target, on_done: OnDone) -> None:
        """See :meth:`tercet.transport.KVTransport.open`."""

        def done(outcome: SendReport | TercetError) -> None:
            with self._lock:
                self._sends.pop(send_id, None)
            on_done(outcome)

        fresh = None
        with self._lock:
            refusal = self._refusal(send_id, target)
            if refusal is None:
                peer = self._peers.get(target.addresses)
                outgoing = peer.open(target.lease, target.head_slice, done) if peer is not None else None
                if peer is None or outgoing is None:
                    peer, outgoing = fresh, _ = self._connect(target, done)
                self._sends[send_id] = (peer, outgoing)
        if fresh is not None:
            fresh.start()
        if refusal is not None:
            self.counters.count(sends_failed=1)
            on_done(refusal)

    def push(self, send_id: str, layers: range, slot: int, blocks: Sequence[int]) -> None:
        """See :meth:`tercet.transport.KVTransport.push`; a send that has ended takes no more."""
        found = self._sends.get(send_id)
        if found is not None:
            found[0].push(found[1], layers, slot, blocks)

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

    def _refusal(self, send_id: str, target: Target) -> TercetError | None:
        if self._closed:
            return TransferFailed("the transport was closed")
        if send_id in self._sends:
            return Conflict(f"send {send_id} is under way already")
        if not _LEASE.fullmatch(target.lease) or not target.addresses:
            return BadRequest(f"lease: {target.lease!r:.80} at {target.addresses!r:.80} is none", "kv_addr_info")
        head_slice = target.head_slice
        inside = 0 <= head_slice.source_offset <= self._origin.region.shape.block_bytes - head_slice.size
        if not (head_slice.size > 0 and inside and 0 <= head_slice.part < head_slice.parts):
            return BadRequest(f"{head_slice} is no part of this rank's blocks", "kv_addr_info")
        return None

    def _connect(self, target: Target, done: OnDone) -> tuple[Peer, Outgoing]:
        """A peer with its first send; it is to be started once the lock is free."""
        peer = Peer(target.addresses, self._origin, self._forget)
        self._peers[target.addresses] = peer
        outgoing = peer.open(target.lease, target.head_slice, done)
        assert outgoing is not None, "a session that was not started cannot be over"
        return peer, outgoing

    def _forget(self, peer: Peer) -> None:
        with self._lock:
            if self._peers.get(peer.addresses) is peer:
                del self._peers[peer.addresses]
            self._ending.add(peer)

    def close(self) -> None:
        """End every session; later sends fail."""
        with self._lock:
            self._closed = True
            peers = {*self._peers.values(), *self._ending}
        for peer in peers:
            peer.close()
