"""Leases: blocks of a simulated engine that wait for KV."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tercet.lab.sim.block_pool import BlockPool, Holding
from tercet.lab.sim.prompts import Prompt
from tercet.protocol import NoSpace


@dataclass(eq=False, slots=True)
class Lease:
    """One reservation: blocks for the first ``end`` tokens of ``prompt``, of which ``matched`` were cached here.

    ``received`` are the ranges whose KV is in place. It ends ``ttl`` seconds after the last activity.
    """

    name: str
    seq_id: str
    prompt: Prompt
    end: int
    matched: int
    holding: Holding = field(default_factory=Holding)
    ttl: float = 0.0
    timer: asyncio.TimerHandle | None = None
    received: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    @property
    def valid_end(self) -> int:
        """How far the KV has arrived without a gap."""
        reached = self.matched
        for begin, end in sorted(self.received):
            if begin > reached:
                break
            reached = max(reached, end)
        return reached


class Leases:
    """All leases of one engine; together they pin at most ``max_blocks``."""

    def __init__(self, pool: BlockPool, block_size: int, max_blocks: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._pinned = 0
        self._by_name: dict[str, Lease] = {}
        self._by_seq: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def check(self, end: int) -> None:
        """Raise ``NoSpace`` for more than a lease can ever have."""
        needed = self.blocks_for(end)
        if needed > self._max_blocks:
            raise NoSpace(f"{needed} blocks exceed max_lease_share ({self._max_blocks} blocks)")

    def blocks_for(self, end: int) -> int:
        """Number of blocks of a lease for ``end`` tokens: there is room for one more token, to begin decoding."""
        return end // self._block_size + 1

    def within_share(self, end: int) -> bool:
        """Whether one more lease for ``end`` tokens is within the limit of all leases."""
        return self._pinned + self.blocks_for(end) <= self._max_blocks

    def reserve(self, name: str, seq_id: str, prompt: Prompt, end: int, margin: int) -> Lease:
        """Match and pin, leaving ``margin`` blocks free; raises ``NoSpace``, and then takes nothing."""
        match = self._pool.match(prompt, end // self._block_size)
        needed = self.blocks_for(end)
        if self._pinned + needed > self._max_blocks:
            raise NoSpace(f"{needed} blocks on top of {self._pinned} under lease exceed {self._max_blocks}")
        if not self._pool.fits(match, needed - match.blocks + margin):
            raise NoSpace(f"{needed} blocks are needed and {self._pool.free} are free")
        lease = Lease(name, seq_id, prompt, end, match.blocks * self._block_size)
        self._pool.pin(lease.holding, match)
        self._pool.take(lease.holding, needed - match.blocks)
        self._pinned += needed
        self._by_name[name] = self._by_seq[seq_id] = lease
        return lease

    def extend(self, lease: Lease, prompt: Prompt, end: int, margin: int) -> None:
        """Pin more for an open lease, up to ``end`` of ``prompt``, which begins with its prompt.

        Raises ``NoSpace``, and then takes nothing.
        """
        more = end // self._block_size - lease.end // self._block_size
        if self._pinned + more > self._max_blocks:
            raise NoSpace(f"{more} blocks on top of {self._pinned} under lease exceed {self._max_blocks}")
        if more + margin > self._pool.free:
            raise NoSpace(f"{more} blocks are needed and {self._pool.free} are free")
        self._pool.take(lease.holding, more)
        self._pinned += more
        lease.prompt, lease.end = prompt, end

    def find(self, name: str) -> Lease | None:
        """The lease, if it is open."""
        return self._by_name.get(name)

    def of(self, seq_id: str) -> Lease | None:
        """The sequence's lease, if it is open."""
        return self._by_seq.get(seq_id)

    def end(self, lease: Lease) -> None:
        """Remove a lease; its blocks now belong to the caller, to hand over or give back."""
        if lease.timer is not None:
            lease.timer.cancel()
        del self._by_name[lease.name], self._by_seq[lease.seq_id]
        self._pinned -= lease.holding.blocks

    def publish(self, lease: Lease) -> None:
        """Make received KV available; between steps."""
        self._pool.publish(lease.holding, lease.prompt, lease.valid_end // self._block_size)

    def give_back(self, lease: Lease) -> None:
        """Free an ended lease's blocks; received KV stays cached. Between steps."""
        self.publish(lease)
        self._pool.give_back(lease.holding)

    def drop_all(self) -> None:
        """End every lease without giving anything back: the pool is lost."""
        for lease in list(self._by_name.values()):
            self.end(lease)
