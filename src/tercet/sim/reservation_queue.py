"""In which order reservations and waiting sequences of a simulated engine get blocks: that of their arrival.

As in the plugin: a reservation waits until it fits next to what those before it still need, and sequences that came
after it are held back while they would take its blocks.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from tercet.protocol import Conflict, NoSpace, TercetError
from tercet.sim.leases import Lease, Leases
from tercet.sim.prompts import Prompt
from tercet.sim.sequence_work import Work


class Needs(Protocol):
    """The scheduler, which knows who else needs blocks."""

    def arrival(self) -> int:
        """The place of who arrives now among all arrivals."""
        ...

    def needed_before(self, arrival: int | None) -> int:
        """Blocks that sequences still need which began or hold some, or arrived before; those of all with None."""
        ...


@dataclass(eq=False, slots=True)
class AskedReservation:
    """A reservation that was asked for: ``lease`` once it has its blocks, ``why`` it has none yet.

    ``answer`` is resolved for whoever waits for it.
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
        """It gets no blocks any more."""
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error)


class SimReservationQueue:
    """Reservations that have no blocks yet; everything here runs between steps."""

    def __init__(self, leases: Leases, needs: Needs) -> None:
        self._leases = leases
        self._needs = needs
        self._waiting: OrderedDict[str, AskedReservation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def of(self, seq_id: str) -> AskedReservation | None:
        """The sequence's reservation that waits."""
        return next((asked for asked in self._waiting.values() if asked.seq_id == seq_id), None)

    def reserve(self, name: str, seq_id: str, prompt: Prompt, end: int) -> AskedReservation:
        """Reserve blocks now, or in their turn. Raises ``NoSpace`` for what never fits, and ``Conflict``."""
        if self._leases.of(seq_id) is not None or self.of(seq_id) is not None:
            raise Conflict(f"seq_id: {seq_id} is in use on this engine; abort it or choose another", "seq_id")
        self._leases.check(end)
        asked = self._waiting[name] = AskedReservation(name, seq_id, prompt, end, self._needs.arrival())
        self.admit()
        return asked

    def extend(self, lease: Lease, prompt: Prompt, end: int) -> None:
        """Pin more for an open lease, of what everybody leaves who waits already. Raises ``NoSpace``."""
        if self._waiting:
            raise NoSpace("reservations that came before it wait for blocks")
        self._leases.extend(lease, prompt, end, self._needs.needed_before(None))

    def admit(self, stepping: int = 0) -> None:
        """Give blocks to those that wait, the first ones first; ``stepping`` are promised to the step being planned."""
        while self._waiting:
            asked = next(iter(self._waiting.values()))
            before = stepping + self._needs.needed_before(asked.arrival)
            try:
                asked.lease = self._leases.reserve(asked.name, asked.seq_id, asked.prompt, asked.end, before)
            except NoSpace as error:
                asked.why = error
                return
            del self._waiting[asked.name]
            if asked.answer is not None and not asked.answer.done():
                asked.answer.set_result(asked.lease)

    def give_up(self, asked: AskedReservation, error: TercetError | None = None) -> None:
        """End a wait, with what it waits for if no other ``error`` is given."""
        if self._waiting.pop(asked.name, None) is not None:
            asked.refuse(error or asked.why or NoSpace("reservations that came before it wait for blocks"))
            self.admit()

    def drop_all(self, error: TercetError) -> None:
        """The engine is lost."""
        for asked in self._waiting.values():
            asked.refuse(error)
        self._waiting.clear()

    def holds_back(self, work: Work, needed: int, free: int) -> bool:
        """Whether a sequence without blocks must wait, so that a reservation that came first gets its own."""
        first = next(iter(self._waiting.values()), None)
        if first is None or work.arrival < first.arrival:
            return False
        # One that waits for another lease's end takes nothing from others.
        return self._leases.within_share(first.end) and free < needed + self._leases.blocks_for(first.end)
