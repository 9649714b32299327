"""The leases of a simulated engine: their blocks, the queue of reservations, and the KV that has arrived.

States, names and timeouts are those of :mod:`tercet.engine.leases`, in virtual time. As in the plugin, reservations and
waiting sequences get blocks in the order of arrival: a reservation waits until the free blocks suffice for it and all
earlier requests, and later sequences are held back while they would take its blocks.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from tercet.engine.leases import Lease, LeaseState, LeaseTable, aborted_while_reserving, require_continued
from tercet.protocol import LeaseEnded, NoSpace, Request, TercetError
from tercet_lab.sim.block_pool import BlockPool, Holding, Prompt
from tercet_lab.sim.scheduler import SimScheduler
from tercet_lab.sim.step_selection import Work


@dataclass(eq=False, slots=True)
class PromptLease(Lease):
    """A lease for the first ``end`` tokens of ``prompt``, of which the first ``matched`` were there already."""

    prompt: Prompt
    end: int
    matched: int = 0

    @property
    def valid_end(self) -> int:
        """Number of tokens from the start whose KV is here without a gap."""
        raise NotImplementedError


@dataclass(eq=False, slots=True)
class SimLease(PromptLease):
    """A lease of an engine's blocks. While they are reserved, the caller waits for ``answer``."""

    state: LeaseState = "asked"
    holding: Holding = field(default_factory=Holding)
    received: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # token ranges whose KV has arrived
    arrival: int = 0  # in the order of all arrivals
    why: NoSpace | None = None  # the reason why it waits
    answer: asyncio.Future[None] | None = None

    @property
    def valid_end(self) -> int:
        reached = self.matched
        for begin, end in sorted(self.received):
            if begin > reached:
                break
            reached = max(reached, end)
        return reached

    def require_same(self, request: Request, output: Sequence[int], end: int | None = None) -> None:
        """Raise ``BadRequest`` unless the lease has the request's adapter, cache salt and tokens.

        The tokens are those of the prompt and ``output``, up to ``end`` (None: all) or the end of the lease.
        """
        reserved = self.prompt.tokens
        differs = "adapter" if self.prompt.adapter != request.adapter else ""
        if not differs and not self.prompt.has_salt(request.cache_salt):
            differs = "cache_salt"
        if differs or reserved is not request.prompt or (end is not None and end < self.end):
            require_continued(reserved[: self.end], (*request.prompt, *output)[:end], differs)


L = TypeVar("L", bound=PromptLease)


class PromptLeases(LeaseTable[L]):
    """The leases of an engine or a store."""

    def __init__(self) -> None:
        super().__init__(self.end)

    def end(self, lease: L, error: LeaseEnded | None = None) -> None:
        """End a lease; ``error`` is for a caller who waits for its blocks."""
        raise NotImplementedError


class SimLeases(PromptLeases[SimLease]):
    """The leases of one engine, which pin at most ``max_blocks`` blocks. Those in ``waits`` have no blocks yet."""

    def __init__(self, pool: BlockPool, block_size: int, max_blocks: int, scheduler: SimScheduler) -> None:
        super().__init__()
        self._pool = pool
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self._pinned = 0
        self.waits = OrderedDict[SimLease, None]()  # in the order of arrival
        scheduler.reservations = self

    def blocks_for(self, end: int) -> int:
        """Return the number of blocks of a lease for ``end`` tokens and one more token, the first one to decode."""
        return end // self._block_size + 1

    # ---- blocks; called between steps ------------------------------------------------------------------------

    def reserve(self, lease: SimLease) -> SimLease:
        """Reserve a lease's blocks now or in turn.

        Raise ``NoSpace`` if they can never fit, and ``Conflict`` if the sequence has a lease.
        """
        self.add(lease)
        needed = self.blocks_for(lease.end)
        if needed > self._max_blocks:
            self._leave(lease, "refused")
            raise NoSpace(f"{needed} blocks are needed, and max_lease_share allows {self._max_blocks} blocks")
        lease.arrival = self._scheduler.arrival()
        self.waits[lease] = None
        self.admit()
        return lease

    def admit(self, stepping: int = 0) -> None:
        """Give blocks to waiting leases in order, and keep ``stepping`` blocks for the step being planned."""
        while self.waits:
            lease = next(iter(self.waits))
            margin = stepping + self._scheduler.needed_before(lease.arrival)
            match = self._pool.match(lease.prompt, lease.end // self._block_size)
            needed = self.blocks_for(lease.end)
            if self._pinned + needed > self._max_blocks:
                among = f"with {self._pinned} under other leases"
                lease.why = NoSpace(f"{needed} blocks, {among}, exceed the limit of {self._max_blocks}")
                return
            if not self._pool.fits(match, needed - match.blocks + margin):
                lease.why = NoSpace(f"{needed} blocks are needed, and {self._pool.free} are free")
                return
            self._pool.pin(lease.holding, match)
            self._pool.take(lease.holding, needed - match.blocks)
            self._pinned += needed
            lease.matched = match.blocks * self._block_size
            lease.state = "open"
            del self.waits[lease]
            if lease.answer is not None and not lease.answer.done():
                lease.answer.set_result(None)

    def holds_back(self, work: Work, needed: int, free: int) -> bool:
        """True if a sequence without blocks must wait, so that an earlier reservation gets its blocks."""
        first = next(iter(self.waits), None)
        if first is None or work.arrival < first.arrival:
            return False
        blocks = self.blocks_for(first.end)
        # A reservation that waits for the end of another lease holds back no sequence.
        return self._pinned + blocks <= self._max_blocks and free < needed + blocks

    def extend(self, name: str, request: Request, prompt: Prompt, end: int) -> SimLease:
        """Extend an open lease up to ``end`` tokens of ``prompt``, with blocks that no waiting sequence needs.

        Raise ``NoSpace``, ``UnknownSequence`` or ``BadRequest``; then nothing is taken.
        """
        lease = self.require(name, request.seq_id)
        lease.require_same(request, (), end)
        if self.waits:
            raise NoSpace("earlier reservations wait for blocks")
        more = end // self._block_size - lease.end // self._block_size
        if self._pinned + more > self._max_blocks:
            raise NoSpace(
                f"{more} more blocks, with {self._pinned} under leases, exceed the limit of {self._max_blocks}"
            )
        if more + self._scheduler.needed_before(None) > self._pool.free:
            raise NoSpace(f"{more} blocks are needed, and {self._pool.free} are free")
        self._pool.take(lease.holding, more)
        self._pinned += more
        lease.prompt, lease.end = prompt, end
        self.renew(lease)
        return lease

    def publish(self, lease: SimLease) -> None:
        """Add the received KV to the prefix cache."""
        self._pool.publish(lease.holding, lease.prompt, lease.valid_end // self._block_size)

    def give_back(self, lease: SimLease) -> None:
        """Free the blocks of an ended lease; received KV stays cached."""
        self.publish(lease)
        self._pool.give_back(lease.holding)
        self.admit()

    # ---- the life of a lease; called at any time -------------------------------------------------------------

    async def opened(self, lease: SimLease, until: float) -> None:
        """Wait until the lease has its blocks. Its time begins then.

        Wait until ``until``, a time of the loop; raise ``NoSpace`` after that, and ``LeaseEnded`` if the sequence was
        aborted. After an error or a cancellation, no blocks stay taken.
        """
        if lease.state == "asked":
            lease.answer = self._loop.create_future()
            timer = self._loop.call_at(until, self._scheduler.between_steps, partial(self._give_up, lease))
            try:
                await lease.answer
            except BaseException:
                self.end(lease)
                raise
            finally:
                timer.cancel()
        if lease.state != "open":
            raise aborted_while_reserving(lease.seq_id)
        self.renew(lease)

    def claim(self, lease: SimLease) -> Holding:
        """Hand the blocks of an open lease over to a request of its sequence."""
        if self._leave(lease, "adopted"):
            self._pinned -= lease.holding.blocks
        return lease.holding

    def abort(self, seq_id: str) -> None:
        """End the sequence's lease, if it has one."""
        lease = self.of(seq_id)
        if lease is not None:
            self.end(lease, aborted_while_reserving(seq_id))

    def end(self, lease: SimLease, error: LeaseEnded | None = None) -> None:
        """End a lease now, and free its blocks between steps. A reservation ends between steps, with ``error``."""
        if lease.state == "asked":
            self._scheduler.between_steps(partial(self._end_reserving, lease, error))
        elif self._leave(lease, "freed"):
            self._pinned -= lease.holding.blocks
            self._scheduler.between_steps(partial(self.give_back, lease))

    def _end_reserving(self, lease: SimLease, error: LeaseEnded | None) -> None:
        if lease.state == "asked":
            self._give_up(lease, error)
        else:
            self.end(lease)  # it has received its blocks in the meantime

    def _give_up(self, lease: SimLease, error: TercetError | None = None) -> None:
        """End a reservation that waits, with ``error`` (None: with the reason why it waits)."""
        if lease in self.waits:
            self._refuse(lease, error or lease.why or NoSpace("earlier reservations wait for blocks"))
            self.admit()

    def _refuse(self, lease: SimLease, error: TercetError) -> None:
        del self.waits[lease]
        self._leave(lease, "refused")
        if lease.answer is not None and not lease.answer.done():
            lease.answer.set_exception(error)

    def take_in(self, name: str, begin: int, end: int) -> None:
        """Record that the KV of the tokens ``[begin, end)`` has arrived under the lease."""
        lease = self.find(name)
        if lease is not None:
            lease.received.append((begin, end))
            self._scheduler.between_steps(lambda: self.publish(lease) if lease.state == "open" else None)

    def _leave(self, lease: SimLease, state: LeaseState) -> bool:
        """Hold a lease no longer; return False if it was not held."""
        if not self.remove(lease):
            return False
        lease.state = state
        return True

    def drop_all(self, error: TercetError) -> None:
        """End every lease without giving back blocks: the engine is lost. Reservations end with ``error``."""
        for lease in list(self.waits):
            self._refuse(lease, error)
        for lease in self:
            self._leave(lease, "freed")
        self._pinned = 0
