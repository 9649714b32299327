"""The life of a simulated engine's leases: each ends at its timeout, and received KV is cached between steps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from tercet.protocol import (
    KVAddrInfo,
    KVLayout,
    LeaseEnded,
    RankAddress,
    Request,
    Reservation,
    TercetError,
    UnknownSequence,
)
from tercet_lab.sim.engine_options import check_same
from tercet_lab.sim.leases import Lease, Leases
from tercet_lab.sim.prompts import Prompt
from tercet_lab.sim.reservation_queue import AskedReservation, SimReservationQueue
from tercet_lab.sim.scheduler import SimScheduler


class Address(NamedTuple):
    """The data that senders need about an engine: its name, its URL and its KV layout."""

    engine: str
    url: str
    layout: KVLayout


class LivingLeases:
    """The leases of one engine with their timeouts. Each number of ``numbers`` is part of one lease's name."""

    def __init__(self, address: Address, leases: Leases, scheduler: SimScheduler, numbers: Iterator[int]) -> None:
        self._address = address
        self._leases = leases
        self._scheduler = scheduler
        self._numbers = numbers
        self._loop = asyncio.get_running_loop()
        self.queue = scheduler.reservations = SimReservationQueue(leases, scheduler)

    def told(self, lease: Lease, matched: int) -> Reservation:
        """Return a lease in the form that ``prep_recv`` returns."""
        engine, url, layout = self._address
        ranks = (RankAddress(0, (url,)),)
        said = (lease.name, engine, lease.matched, lease.end, "sim", ranks, layout)
        return Reservation(KVAddrInfo(*said, adapter=lease.prompt.adapter or ""), matched)

    def reserve(self, seq_id: str, prompt: Prompt, end: int) -> AskedReservation:
        """Queue a reservation, which gets its blocks now or in turn. Call this between steps.

        Raise ``NoSpace`` if it can never fit, and ``Conflict`` if the sequence already has a lease or reservation.
        """
        return self.queue.reserve(f"{self._address.engine}:{next(self._numbers)}", seq_id, prompt, end)

    async def granted(self, asked: AskedReservation, ttl: float, until: float) -> Lease:
        """Return the lease when it has its blocks. It ends ``ttl`` seconds after its last activity.

        Wait until ``until``, a time of the loop. Raise ``NoSpace`` after that, and ``LeaseEnded`` if the sequence was
        aborted. After an error or a cancellation, no blocks stay taken.
        """
        if asked.lease is None:
            asked.answer = self._loop.create_future()
            give_up = partial(self.queue.give_up, asked)
            timer = self._loop.call_at(until, self._scheduler.between_steps, give_up)
            try:
                await asked.answer
            except BaseException:
                self.forget(asked)
                raise
            finally:
                timer.cancel()
        lease = asked.lease
        if lease is None or self._leases.find(lease.name) is not lease:
            raise LeaseEnded(f"{asked.seq_id} was aborted while blocks were being reserved", "seq_id")
        lease.ttl = ttl
        self._renew(lease)
        return lease

    def forget(self, asked: AskedReservation) -> None:
        """Drop a reservation that its caller no longer awaits, and give back its blocks."""
        if asked.lease is not None:
            self.end(asked.lease)
        else:
            self._scheduler.between_steps(partial(self._drop, asked))

    def _drop(self, asked: AskedReservation, error: TercetError | None = None) -> None:
        """End a reservation that still waits, or has received its blocks in the meantime."""
        if asked.lease is not None:
            self.end(asked.lease)
        else:
            self.queue.give_up(asked, error)

    def abort(self, seq_id: str) -> None:
        """End the sequence's lease, or its waiting reservation."""
        lease, asked = self._leases.of(seq_id), self.queue.of(seq_id)
        if lease is not None:
            self.end(lease)
        if asked is not None:
            error = LeaseEnded(f"{seq_id} was aborted while blocks were being reserved", "seq_id")
            self._scheduler.between_steps(partial(self._drop, asked, error))

    def extend(self, name: str, request: Request, prompt: Prompt, end: int) -> Lease:
        """Extend an open lease up to ``end`` tokens of ``prompt``, the request's prompt.

        Raise ``NoSpace``, ``UnknownSequence`` or ``BadRequest``; then nothing is taken.
        """
        lease = self._leases.find(name)
        if lease is None or lease.seq_id != request.seq_id:
            raise UnknownSequence(f"lease: this engine has no lease {name} for {request.seq_id}", "lease")
        check_same(lease, request, (), end)
        self.queue.extend(lease, prompt, end)
        self._renew(lease)
        return lease

    def end(self, lease: Lease) -> None:
        """End a lease now if it is still open, and free its blocks between steps."""
        if self._leases.find(lease.name) is lease:
            self._leases.end(lease)
            self._scheduler.between_steps(partial(self._give_back, lease))

    def _give_back(self, lease: Lease) -> None:
        self._leases.give_back(lease)
        self.queue.admit()

    def refusal(self, found: Lease | None, same: bool) -> str | None:
        """Return the reason why a lease does not accept KV, or None: then its timeout starts again.

        ``found`` is the lease, or None if it has ended. ``same`` is True if the KV is of the lease's tokens.
        """
        if found is None:
            return "the lease has ended"
        if not same:
            return f"the KV has other tokens, another cache salt or another adapter than lease {found.name}"
        self._renew(found)
        return None

    def take_in(self, name: str, begin: int, end: int) -> None:
        """Record that the KV of the tokens ``[begin, end)`` has arrived under the lease."""
        found = self._leases.find(name)
        if found is not None:
            found.received.append((begin, end))
            self._scheduler.between_steps(partial(self._publish, found))

    def _publish(self, lease: Lease) -> None:
        if self._leases.find(lease.name) is lease:
            self._leases.publish(lease)

    def _renew(self, lease: Lease) -> None:
        """Restart the lease's timeout, after an activity."""
        if lease.timer is not None:
            lease.timer.cancel()
        lease.timer = self._loop.call_later(lease.ttl, self.end, lease)
