"""The leases of a simulated engine: blocks that are reserved for KV."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tercet.protocol import NoSpace
from tercet_lab.sim.block_pool import BlockPool, Holding
from tercet_lab.sim.prompts import Prompt


@dataclass(eq=False, slots=True)
class Lease:
    """One reservation: blocks for the first ``end`` tokens of ``prompt``.

    The first ``matched`` tokens were cached already; ``received`` are the token ranges whose KV has arrived. The lease
    ends ``ttl`` seconds after its last activity.
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
        """Number of tokens from the start whose KV is here without a gap."""
        reached = self.matched
        for begin, end in sorted(self.received):
            if begin > reached:
                break
            reached = max(reached, end)
        return reached


class Leases:
    """All leases of one engine. Together they pin at most ``max_blocks`` blocks."""

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
        """Raise ``NoSpace`` if a lease for ``end`` tokens exceeds the limit of all leases."""
        needed = self.blocks_for(end)
        if needed > self._max_blocks:
            raise NoSpace(f"{needed} blocks are needed, and max_lease_share allows {self._max_blocks} blocks")

    def blocks_for(self, end: int) -> int:
        """Return the number of blocks of a lease for ``end`` tokens and one more token, the first one to decode."""
        return end // self._block_size + 1

    def within_share(self, end: int) -> bool:
        """True if one more lease for ``end`` tokens is within the limit of all leases."""
        return self._pinned + self.blocks_for(end) <= self._max_blocks

    def reserve(self, name: str, seq_id: str, prompt: Prompt, end: int, margin: int) -> Lease:
        """Pin the cached blocks and take the others, so that ``margin`` blocks stay free; return the lease.

        Raise ``NoSpace`` if that is not possible; then nothing is taken.
        """
        match = self._pool.match(prompt, end // self._block_size)
        needed = self.blocks_for(end)
        if self._pinned + needed > self._max_blocks:
            raise NoSpace(
                f"{needed} blocks, with {self._pinned} under other leases, exceed the limit of {self._max_blocks}"
            )
        if not self._pool.fits(match, needed - match.blocks + margin):
            raise NoSpace(f"{needed} blocks are needed, and {self._pool.free} are free")
        lease = Lease(name, seq_id, prompt, end, match.blocks * self._block_size)
        self._pool.pin(lease.holding, match)
        self._pool.take(lease.holding, needed - match.blocks)
        self._pinned += needed
        self._by_name[name] = self._by_seq[seq_id] = lease
        return lease

    def extend(self, lease: Lease, prompt: Prompt, end: int, margin: int) -> None:
        """Take blocks for an open lease up to ``end`` tokens of ``prompt``, which begins with the lease's prompt.

        Raise ``NoSpace`` if that is not possible; then nothing is taken.
        """
        more = end // self._block_size - lease.end // self._block_size
        if self._pinned + more > self._max_blocks:
            raise NoSpace(
                f"{more} more blocks, with {self._pinned} under leases, exceed the limit of {self._max_blocks}"
            )
        if more + margin > self._pool.free:
            raise NoSpace(f"{more} blocks are needed, and {self._pool.free} are free")
        self._pool.take(lease.holding, more)
        self._pinned += more
        lease.prompt, lease.end = prompt, end

    def find(self, name: str) -> Lease | None:
        """Return the open lease of this name, or None."""
        return self._by_name.get(name)

    def of(self, seq_id: str) -> Lease | None:
        """Return the sequence's open lease, or None."""
        return self._by_seq.get(seq_id)

    def end(self, lease: Lease) -> None:
        """Remove a lease. The caller now owns its blocks, and hands them over or gives them back."""
        if lease.timer is not None:
            lease.timer.cancel()
        del self._by_name[lease.name], self._by_seq[lease.seq_id]
        self._pinned -= lease.holding.blocks

    def publish(self, lease: Lease) -> None:
        """Add the received KV to the prefix cache. Call this between steps."""
        self._pool.publish(lease.holding, lease.prompt, lease.valid_end // self._block_size)

    def give_back(self, lease: Lease) -> None:
        """Free the blocks of an ended lease; received KV stays cached. Call this between steps."""
        self.publish(lease)
        self._pool.give_back(lease.holding)

    def drop_all(self) -> None:
        """End every lease without giving back blocks: the pool is lost."""
        for lease in list(self._by_name.values()):
            self.end(lease)
