"""The queue of a simulated engine's reservations: they and waiting sequences get blocks in the order of arrival.

As in the plugin, a reservation waits until the free blocks suffice for it and all earlier requests. Later sequences are
held back while they would take its blocks.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from tercet.protocol import Conflict, NoSpace, TercetError
from tercet_lab.sim.leases import Lease, Leases
from tercet_lab.sim.prompts import Prompt
from tercet_lab.sim.sequence_work import Work


class Needs(Protocol):
    """The part of the scheduler that knows how many blocks other sequences need."""

    def arrival(self) -> int:
        """Return the number of an arrival now, in the order of all arrivals."""
        ...

    def needed_before(self, arrival: int | None) -> int:
        """Return the number of blocks that sequences still need.

        It counts the sequences that run, that hold blocks, or that arrived before ``arrival`` (None: all).
        """
        ...


@dataclass(eq=False, slots=True)
class AskedReservation:
    """A requested reservation. ``lease`` is set when it has its blocks; ``why`` is the reason why it waits.

    ``answer`` is the future of the caller that waits for it.
    """

    name: str
    seq_id: str
    prompt: Prompt
    end: int
    arrival: int
    lease: Lease | None = None
    why: NoSpace | None = None
    answer: asyncio.Future[Lease] | None = None

    def refuse(self, error: TercetError) -> None:
        """End the reservation without blocks."""
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error)


class SimReservationQueue:
    """The reservations that wait for blocks: ``waits``, by name, in the order of arrival.

    All methods are called between steps.
    """

    def __init__(self, leases: Leases, needs: Needs) -> None:
        self._leases = leases
        self._needs = needs
        self.waits: OrderedDict[str, AskedReservation] = OrderedDict()

    def __len__(self) -> int:
        return len(self.waits)

    def of(self, seq_id: str) -> AskedReservation | None:
        """Return the sequence's waiting reservation, or None."""
        return next((asked for asked in self.waits.values() if asked.seq_id == seq_id), None)

    def reserve(self, name: str, seq_id: str, prompt: Prompt, end: int) -> AskedReservation:
        """Reserve blocks now or in turn.

        Raise ``NoSpace`` if they can never fit, and ``Conflict`` if the sequence has a lease or reservation.
        """
        if self._leases.of(seq_id) is not None or self.of(seq_id) is not None:
            raise Conflict(f"seq_id: {seq_id} is in use on this engine; abort it or choose another", "seq_id")
        self._leases.check(end)
        asked = self.waits[name] = AskedReservation(name, seq_id, prompt, end, self._needs.arrival())
        self.admit()
        return asked

    def extend(self, lease: Lease, prompt: Prompt, end: int) -> None:
        """Take more blocks for an open lease, from those that no waiting sequence needs.

        Raise ``NoSpace`` if they do not suffice, or if a reservation waits.
        """
        if self.waits:
            raise NoSpace("earlier reservations wait for blocks")
        self._leases.extend(lease, prompt, end, self._needs.needed_before(None))

    def admit(self, stepping: int = 0) -> None:
        """Give blocks to waiting reservations in order, and keep ``stepping`` blocks for the step being planned."""
        while self.waits:
            asked = next(iter(self.waits.values()))
            before = stepping + self._needs.needed_before(asked.arrival)
            try:
                asked.lease = self._leases.reserve(asked.name, asked.seq_id, asked.prompt, asked.end, before)
            except NoSpace as error:
                asked.why = error
                return
            del self.waits[asked.name]
            if asked.answer is not None and not asked.answer.done():
                asked.answer.set_result(asked.lease)

    def give_up(self, asked: AskedReservation, error: TercetError | None = None) -> None:
        """End a reservation that waits, with ``error`` (None: with the reason why it waits)."""
        if self.waits.pop(asked.name, None) is not None:
            asked.refuse(error or asked.why or NoSpace("earlier reservations wait for blocks"))
            self.admit()

    def drop_all(self, error: TercetError) -> None:
        """End all reservations with ``error``, because the engine is lost."""
        for asked in self.waits.values():
            asked.refuse(error)
        self.waits.clear()

    def holds_back(self, work: Work, needed: int, free: int) -> bool:
        """True if a sequence without blocks must wait, so that an earlier reservation gets its blocks."""
        first = next(iter(self.waits.values()), None)
        if first is None or work.arrival < first.arrival:
            return False
        # A reservation that waits for the end of another lease holds back no sequence.
        return self._leases.within_share(first.end) and free < needed + self._leases.blocks_for(first.end)
