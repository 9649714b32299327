"""The transport of one rank in both directions: the interface for the agent, tests and benchmarks.

A send goes to one or more receiving ranks, with one session per receiver and one result. ``push`` only queues, so a
slow peer delays only its own sends.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from tercet.protocol import BadRequest, Conflict, Content, TercetError, TransferFailed
from tercet.transport.backends import backends_for, backends_of_device
from tercet.transport.grants import GrantTable, OnReceiveEnd
from tercet.transport.local_rank import LocalRank, TransportSettings
from tercet.transport.peer import OnDone, RankSend, SendReport, TransferPeer
from tercet.transport.receiver import KVReceiver, OnFilled
from tercet.transport.region import BlockShape, HeadSlice, KVRegion, PlaneRun, is_core_word
from tercet.transport.staged import StagedMemory

_LEASE = re.compile(r"[0-9a-f]{32}")
REMEMBERED_CANCELLED = 4096


class SendDestination(msgspec.Struct, frozen=True):
    """One receiving rank: its addresses, and its part of the blocks."""

    addresses: tuple[str, ...]
    head_slice: HeadSlice
    planes: tuple[PlaneRun, ...] = ()


@dataclass(eq=False)
class _Send:
    """One send.

    A part for each receiving rank, the number of parts that have not ended, and the results of the others.
    """

    on_done: OnDone
    left: int
    parts: list[tuple[TransferPeer, RankSend]] = field(default_factory=list[tuple[TransferPeer, RankSend]])
    reports: list[SendReport] = field(default_factory=list[SendReport])
    error: TercetError | None = None

    def outcome(self) -> SendReport | TercetError:
        """Return the result to report after all parts have ended."""
        if self.error is not None:
            return self.error
        return SendReport.of_all(self.reports)


class KVSender:
    """All sends of one rank. A session is opened on first use, and again after it has broken. Thread-safe."""

    def __init__(self, rank: LocalRank) -> None:
        self._rank = rank
        self._peers: dict[tuple[str, ...], TransferPeer] = {}
        self._sends: dict[str, _Send] = {}
        # Ids that were cancelled, perhaps before their send was opened: the cancellation counts.
        self._cancelled: deque[str] = deque(maxlen=REMEMBERED_CANCELLED)
        # Broken sessions whose threads still run; the threads keep these entries alive.
        self._ending: weakref.WeakSet[TransferPeer] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = False

    def under_way(self) -> dict[str, int]:
        """Return the numbers of sessions with receivers and of running sends."""
        return {"sessions_out": len(self._peers), "sends_active": len(self._sends)}

    def open(
        self, send_id: str, lease: str, content: Content, destinations: Sequence[SendDestination], on_done: OnDone,
        word: int | None = None, traceparent: str = "",
    ) -> None:  # fmt: skip
        """Begin a send of ``content`` to each of ``destinations``; a send that was cancelled before is dropped.

        Its blocks are pinned, unless ``word`` is given: the number of a core's word that guarantees them, used once.
        Receivers get ``traceparent``, its place in a sampled trace.

        ``on_done`` is called exactly once, when all destinations have the KV or one failed, also for wrong input. The
        caller holds no locks of the transport; the call mostly comes from another thread, but perhaps before a call for
        this send returns. KV of the send that is read after it is not accepted.
        """
        started: list[TransferPeer] = []
        with self._lock:
            # A cancellation that came first: calls of several threads may overtake each other.
            if send_id in self._cancelled:
                return
            # Before any session is opened: wrong input costs no connection.
            refusal = self._refusal(send_id, lease, destinations, word)
            if refusal is None:
                send = self._sends[send_id] = _Send(on_done, len(destinations))
                for to in destinations:
                    ended = partial(self._ended, send_id, send)
                    part = RankSend(lease, content, to.head_slice, ended, planes=to.planes, traceparent=traceparent)
                    part.number = word or part.number
                    send.parts.append((self._session(to.addresses, part, started), part))
                if not send.parts:  # other ranks hold the same heads, and send them
                    del self._sends[send_id]
        # Outside of the lock: a thread that cannot be started ends its session, which takes the lock.
        for peer in started:
            peer.start()
        if refusal is not None:
            self._rank.counters.count(sends_failed=1)
            on_done(refusal)
        elif not destinations:
            on_done(SendReport(0, 0))

    def push(self, send_id: str, layers: range, slot: int, blocks: Sequence[int]) -> None:
        """Offer ``blocks`` of all of ``layers``, which are adjacent, for the receiver's slots from ``slot`` on.

        The KV must not change until the send has ended; a send that has ended ignores this call.
        """
        for peer, part in self._parts(send_id):
            peer.push(part, layers, slot, blocks)

    def finish(self, send_id: str, begin: int, end: int) -> None:
        """Declare that the KV of tokens ``[begin, end)`` is complete."""
        for peer, part in self._parts(send_id):
            peer.finish(part, begin, end)

    def cancel(self, send_id: str) -> None:
        """End a send, also one that has not begun; KV that a receiver reads after this is not accepted."""
        with self._lock:
            self._cancelled.append(send_id)
        for peer, part in self._parts(send_id):
            peer.cancel(part)

    def _parts(self, send_id: str) -> Sequence[tuple[TransferPeer, RankSend]]:
        found = self._sends.get(send_id)
        return found.parts if found is not None else ()

    def _refusal(
        self, send_id: str, lease: str, destinations: Sequence[SendDestination], word: int | None
    ) -> TercetError | None:
        if self._closed:
            return TransferFailed("the transport was closed")
        if send_id in self._sends:
            return Conflict(f"send {send_id} is already running")
        if not _LEASE.fullmatch(lease):
            return BadRequest(f"lease: {lease!r:.80} is not a valid lease", "kv_addr_info")
        if word is not None and not (is_core_word(word) and self._rank.region.has_word(word)):
            return TransferFailed("the engine's core is no longer stuck; send through the core")
        for each in destinations:
            part = each.head_slice
            inside = 0 <= part.source_offset <= self._rank.region.shape.block_bytes - part.size
            held = range(self._rank.region.num_layers + 1)
            known = all(
                run.length > 0 and run.target >= 0 and run.source in held and run.source + run.length in held
                for run in each.planes
            )
            if not (each.addresses and part.size > 0 and inside and known and 0 <= part.part < part.parts):
                what = f"{part}, {each.planes!r:.80} at {each.addresses!r:.80}"
                return BadRequest(f"{what} is not a part of this rank's blocks", "kv_addr_info")
        return None

    def _session(self, addresses: tuple[str, ...], part: RankSend, started: list[TransferPeer]) -> TransferPeer:
        """Return the session for a part; a new one must be started after the lock is released."""
        peer = self._peers.get(addresses)
        # A session that has broken accepts no send: a new one takes its place.
        if peer is None or not peer.open(part):
            peer = self._peers[addresses] = TransferPeer(addresses, self._rank, self._forget)
            started.append(peer)
            peer.open(part)
        return peer

    def _ended(self, send_id: str, send: _Send, outcome: SendReport | TercetError) -> None:
        with self._lock:
            send.left -= 1
            failed_first = isinstance(outcome, TercetError) and send.error is None
            if isinstance(outcome, SendReport):
                send.reports.append(outcome)
            else:
                send.error = send.error or outcome
            over = send.left == 0
            if over:
                del self._sends[send_id]
        if over:
            return send.on_done(send.outcome())
        # If one receiving rank is lost, the others are not needed.
        for peer, part in send.parts if failed_first else ():
            peer.cancel(part)
        return None

    def _forget(self, peer: TransferPeer) -> None:
        with self._lock:
            # A new session may have its place already.
            if self._peers.get(peer.addresses) is peer:
                del self._peers[peer.addresses]
            self._ending.add(peer)

    def close(self) -> None:
        """End all sessions; later sends fail."""
        with self._lock:
            self._closed = True
            peers = {*self._peers.values(), *self._ending}
        for peer in peers:
            peer.close()


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
        self, region: KVRegion, fingerprint: str, settings: TransportSettings | None = None,
        on_filled: OnFilled = lambda _lease, _end: None, block: BlockShape | None = None,
        staged: StagedMemory | None = None, on_receive_end: OnReceiveEnd = lambda _: None,
    ) -> None:  # fmt: skip
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
