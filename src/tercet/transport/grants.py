"""Write permissions: the receiver's side of leases, as a state machine without I/O.

The central invariant: after :meth:`GrantTable.revoke` has returned, no byte is written under that lease. A writing
thread is inside :meth:`GrantTable.write`, never waits for a peer there for more than a few milliseconds, and the
revocation waits for it.

This is the transport's only record of leases: the granted blocks, and the arrived parts of each send
(:class:`~tercet.transport.open_lease.OpenLease`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from tercet.protocol import Conflict, Content, LeaseEnded, TercetError, TransferFailed, content_of
from tercet.transport.block_sizes import Move
from tercet.transport.grant import Grant
from tercet.transport.open_lease import OpenLease, SendKey
from tercet.transport.peer_messages import ReadDescriptors, SendBegin, SendEnd
from tercet.transport.receive_traces import OnReceiveEnd
from tercet.transport.region import Numbers, planes_of_groups

T = TypeVar("T")
REMEMBERED_ENDED = 4096
# Minimum interval, in seconds, between a lease's reports while sends into it continue.
REPORT_SECONDS = 0.25


class GrantTable:
    """All open grants of one rank; ``groups`` has the number of layers of each group. Thread-safe.

    ``on_receive_end`` is called for each receive of a traced sender, under the table's lock: it must not wait.
    """

    def __init__(self, *groups: int, on_receive_end: OnReceiveEnd = lambda _: None) -> None:
        self._on_receive_end = on_receive_end
        self._groups = planes_of_groups(groups)
        self._open: dict[str, OpenLease] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._open)

    def grant(self, grant: Grant) -> None:
        """Open a grant; raises :class:`~tercet.protocol.Conflict` if the lease is or was in use."""
        grant.require_whole(len(self._groups))
        opened = OpenLease(grant, self._groups, self._on_receive_end)
        with self._changed:
            if grant.lease in self._open or grant.lease in self._ended:
                raise Conflict(f"lease {grant.lease} has already been granted", "lease")
            self._open[grant.lease] = opened

    def extend(self, grant: Grant) -> None:
        """Extend a lease: more tokens of its sequence, and more blocks after its blocks.

        Some of its blocks may already be closed: superseded state blocks are not needed but still belong to the lease.

        Raises :class:`~tercet.protocol.LeaseEnded`, or :class:`~tercet.protocol.BadRequest` for anything that is not
        the same lease with more tokens and blocks; the lease is then unchanged.
        """
        grant.require_whole(len(self._groups))
        with self._changed:
            self._find(grant.lease).extend(grant)

    def begin(self, send: SendKey, begun: SendBegin) -> None:
        """Accept a send if its KV is that of the lease's tokens.

        Raises :class:`~tercet.protocol.Conflict` for other KV, :class:`~tercet.protocol.LeaseEnded` or
        :class:`~tercet.protocol.BadRequest`.
        """
        with self._changed:
            self._find(begun.lease).begin(send, begun)

    def content(self, lease: str, end: int) -> Content | None:
        """Return the content of a lease's first ``end`` tokens; None if the lease has ended."""
        opened = self._open.get(lease)
        return None if opened is None else content_of(opened.grant.tokens, opened.grant.salt, end)

    def in_place(self, send: SendKey, lease: str) -> int:
        """Return the number of the lease's first blocks that are valid and not written again; it never decreases.

        ``send`` must have begun. Raises :class:`~tercet.protocol.LeaseEnded` or :class:`~tercet.protocol.BadRequest`.
        """
        with self._changed:
            return self._find(lease).in_place(send)

    def locate(self, chunk: ReadDescriptors, in_place: int = 0) -> Numbers:
        """Return the blocks of a chunk, in slot order; ``NOWHERE`` for the lease's first ``in_place`` blocks.

        Raises :class:`~tercet.protocol.LeaseEnded` or :class:`~tercet.protocol.BadRequest`.
        """
        with self._changed:
            opened = self._find(chunk.lease)
        return opened.locate(chunk, in_place)

    def locate_tokens(self, chunk: ReadDescriptors, in_place: int = 0) -> list[Move]:
        """Return the moves of a chunk whose sender has another block size, without the first ``in_place`` blocks.

        Raises the errors of :meth:`locate`.
        """
        with self._changed:
            opened = self._find(chunk.lease)
        return opened.locate_tokens(chunk, in_place)

    def write(self, lease: str, step: Callable[[], T]) -> T:
        """Run ``step``, which may write the lease's blocks, and return its result; a revocation waits for it.

        Raises :class:`~tercet.protocol.LeaseEnded` instead if the lease has ended. A step must not wait long for a
        peer.
        """
        with self._changed:
            opened = self._find(lease)
            opened.writers += 1
        try:
            return step()
        finally:
            with self._changed:
                opened.writers -= 1
                if not opened.writers:
                    self._changed.notify_all()

    def overwriting(self, chunk: ReadDescriptors, in_place: int = 0) -> None:
        """Mark a chunk's target as invalid until its send is in place; :meth:`locate` has accepted the chunk.

        Call this before the first byte is written. The lease's first ``in_place`` blocks are left out. Raises
        :class:`~tercet.protocol.TransferFailed` if more blocks are in place now, and
        :class:`~tercet.protocol.LeaseEnded`.
        """
        with self._changed:
            self._find(chunk.lease).overwriting(chunk, in_place)

    def arrived(self, send: SendKey, chunk: ReadDescriptors) -> int | None:
        """Record that a chunk, which :meth:`locate` has accepted, is in place; return the result of :meth:`ended`."""
        with self._changed:
            return self._find(chunk.lease).arrived(send, chunk)

    def ended(self, send: SendKey, end: SendEnd) -> int | None:
        """Record a send's end message; its ``begin`` is rounded down to a block's start.

        Return the lease's valid end once all chunks are in place, None while some are missing. Raises
        :class:`~tercet.protocol.TransferFailed` if a chunk will never arrive; the send's KV is then not valid.
        """
        with self._changed:
            return self._find(end.lease).ended(send, end)

    def forget(self, lease: str, send: SendKey, error: TercetError) -> None:
        """Forget a send that an error ended; the part of it that arrived in every layer is valid."""
        with self._changed:
            opened = self._open.get(lease)
            if opened is not None:
                opened.forget(send, error)

    def forget_sender(self, sender: str) -> list[tuple[str, int]]:
        """Forget the sends of a lost sender; return the lease and valid end of each incomplete send."""
        error = TransferFailed("the sender closed the connection")
        with self._changed:
            lost = [(opened, key) for opened in self._open.values() for key in opened.sends if key[0] == sender]
            half_way = [opened for opened, key in lost if opened.forget(key, error)]
            return [(opened.grant.lease, opened.valid.end) for opened in half_way]

    def progress(self, lease: str, now: float) -> int | None:
        """Return the end of an open lease's valid KV, or None if reported less than :data:`REPORT_SECONDS` ago."""
        with self._changed:
            opened = self._open.get(lease)
            if opened is None or now < opened.reported_at + REPORT_SECONDS:
                return None
            opened.reported_at = now
            return opened.keep()

    @property
    def receives(self) -> int:
        """Number of sends that have begun to arrive and are not complete."""
        with self._changed:
            return sum(found.kind is not None for opened in self._open.values() for found in opened.sends.values())

    def revoke(self, lease: str) -> int | None:
        """End a lease; return the end of its contiguous valid KV, ``grant.begin`` if it has none.

        None means that the lease was not open; it cannot be granted later either.
        """
        with self._changed:
            opened = self._open.pop(lease, None)
            self._ended[lease] = None
            if len(self._ended) > REMEMBERED_ENDED:
                self._ended.popitem(last=False)
            if opened is None:
                return None
            self._changed.wait_for(lambda: not opened.writers)
            error = LeaseEnded("the lease ended before all KV had arrived")
            for send in list(opened.sends):
                opened.forget(send, error)
            return opened.valid.end

    def _find(self, lease: str) -> OpenLease:
        opened = self._open.get(lease)
        if opened is None:
            how = "has ended" if lease in self._ended else "was never granted or ended long ago"
            raise LeaseEnded(f"lease {lease} {how}", "kv_addr_info")
        return opened
