"""KV blocks of a simulated engine: the pool with its prefix cache, and leases on blocks that wait for KV."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tercet.protocol import Conflict, EngineLoad, NoSpace
from tercet.sim.prompts import Prompt


class SimObserver(Protocol):
    """Hears of one engine. Blocks are named by hashes that cover everything before them and the cache salt."""

    def load(self, load: EngineLoad) -> None:
        """How busy it is now."""

    def stored(self, hashes: Sequence[int]) -> None:
        """These blocks can be found in its cache now."""

    def dropped(self, hashes: Sequence[int]) -> None:
        """These cannot any more."""

    def cleared(self) -> None:
        """Its cache is empty, or will be told anew."""


@dataclass(eq=False, slots=True)
class Holding:
    """What one holder pins: ``hashes`` of its leading cached blocks in order, and ``plain`` blocks behind them."""

    hashes: list[int] = field(default_factory=list[int])
    plain: int = 0

    @property
    def blocks(self) -> int:
        """All blocks held."""
        return len(self.hashes) + self.plain


class BlockPool:
    """``total`` blocks, of which ``free`` can be taken now, cached ones that nobody pins included.

    ``evicted`` counts the cached ones that were taken back, ``observer`` hears of cached ones.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self.evicted = 0
        # By its hash, each cached block: minus the number of those who pin it, or the turn in which it was let go. The
        # blocks of one turn are a run, of which the last one goes first. One that was pinned again since is still in
        # its old run, and passed over there.
        self._cached: dict[int, int] = {}
        self._unused = 0
        self._runs: deque[tuple[int, list[int]]] = deque()
        self._in_runs = 0
        self._turn = 0
        self.observer: SimObserver | None = None

    def observe(self, observer: SimObserver) -> None:
        """Tell ``observer`` which blocks can be found by their hash, now and from now on."""
        self.observer = observer
        observer.stored(list(self._cached))

    def match(self, hashes: Sequence[int], limit: int) -> int:
        """How many of the first ``limit`` hashes are cached, from the first on without a gap."""
        # A block is pinned, and goes, with all that follow it and never before them: so none is cached behind a gap.
        cached = self._cached
        return bisect_left(hashes, True, hi=min(limit, len(hashes)), key=lambda key: key not in cached)

    def fits(self, hashes: Sequence[int], matched: int, plain: int) -> bool:
        """Whether ``matched`` cached blocks can be pinned and ``plain`` more taken."""
        if plain + matched <= self.free:
            return True
        cached = self._cached
        return plain + sum(cached[key] > 0 for key in hashes[:matched]) <= self.free

    def pin(self, holding: Holding, hashes: Sequence[int], matched: int) -> None:
        """Pin the first ``matched`` of these cached blocks for a holder that has none yet."""
        holding.hashes = list(hashes[:matched])
        self._pin(holding.hashes)

    def _pin(self, keys: Sequence[int]) -> None:
        """One more holder of each of these cached blocks."""
        cached = self._cached
        # Who pins a block pins all before it: those that nobody pins are the last ones.
        held = bisect_left(keys, True, key=lambda key: cached[key] > 0)
        for key in keys[:held]:
            cached[key] -= 1
        idle = keys[held:]
        for key in idle:
            cached[key] = -1
        self._unused -= len(idle)
        self.free -= len(idle)

    def take(self, holding: Holding, count: int) -> None:
        """Add ``count`` plain blocks to a holder; the caller knows that they are free."""
        holding.plain += count
        self.take_plain(count)

    def take_plain(self, count: int) -> None:
        """Pin ``count`` plain blocks that the caller accounts for itself."""
        if count > self.free:
            raise AssertionError(f"{count} blocks were taken and {self.free} are free")
        self.free -= count
        excess = self._unused - self.free
        if excess > 0:
            evicted = self._evict(excess)
            self.evicted += len(evicted)
            if self.observer is not None:
                self.observer.dropped(evicted)

    def _evict(self, count: int) -> list[int]:
        """Take this many blocks that nobody pins, of which there are as many, those first that were let go first."""
        evicted, runs = list[int](), self._runs
        while len(evicted) < count:
            turn, run = runs.popleft()
            self._in_runs -= len(run)
            first = self._first_of(turn, run)
            last = max(first, len(run) - count + len(evicted))
            gone = run[last:]
            deque(map(self._cached.__delitem__, gone), maxlen=0)
            evicted.extend(reversed(gone))
            if last > first:
                runs.appendleft((turn, run[first:last]))
                self._in_runs += last - first
        self._unused -= len(evicted)
        return evicted

    def _first_of(self, turn: int, run: list[int]) -> int:
        """Where those begin that are still let go: blocks are pinned again from the first one on."""
        cached = self._cached
        return bisect_left(run, True, key=lambda key: cached.get(key) == turn)

    def _let_go(self, keys: list[int]) -> None:
        """Nobody pins these blocks any more; they may go, the last one first."""
        self._turn += 1
        cached, turn = self._cached, self._turn
        for key in keys:
            cached[key] = turn
        self._unused += len(keys)
        self._runs.append((self._turn, keys))
        self._in_runs += len(keys)
        if self._in_runs > 2 * self.total:
            kept = ((turn, run[self._first_of(turn, run) :]) for turn, run in self._runs)
            self._runs = deque((turn, run) for turn, run in kept if run)
            self._in_runs = self._unused

    def publish(self, holding: Holding, hashes: Sequence[int]) -> None:
        """Make the holder's plain blocks findable as ``hashes``, which continue what it has published already."""
        new = hashes[len(holding.hashes) : holding.blocks]
        holding.hashes.extend(new)
        holding.plain -= len(new)
        cached, fresh = self._cached, new
        if new and new[0] in cached:
            # Somebody else has these blocks: they are shared from now on, and the copies given back.
            there = self.match(new, len(new))
            self._pin(new[:there])
            self.free += there
            fresh = new[there:]
        for key in fresh:
            cached[key] = -1
        if new and self.observer is not None:
            self.observer.stored(new)

    def give_back(self, holding: Holding) -> None:
        """Unpin all that a holder has; what is published stays cached until its room is needed."""
        hashes, cached = holding.hashes, self._cached
        # Who pins a block pins all before it: those that others pin, too, are the first ones.
        others = bisect_left(hashes, True, key=lambda key: cached[key] == -1)
        for key in hashes[:others]:
            cached[key] += 1
        own = hashes[others:]
        self._let_go(own)
        self.free += len(own) + holding.plain
        holding.hashes = []
        holding.plain = 0

    def drop_plain(self, holding: Holding, count: int) -> None:
        """Give back ``count`` of a holder's plain blocks."""
        holding.plain -= count
        self.free += count


@dataclass(eq=False, slots=True)
class Lease:
    """One reservation: blocks for the first ``end`` tokens of ``prompt``, of which ``matched`` were cached here.

    ``received`` are the ranges whose KV is in place. It ends ``ttl`` seconds after the last sign of life.
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
        """How far the KV is there without a gap."""
        reached = self.matched
        for begin, end in sorted(self.received):
            if begin > reached:
                break
            reached = max(reached, end)
        return reached


class Leases:
    """All leases of one engine; together they pin at most ``max_blocks``."""

    def __init__(self, pool: BlockPool, block_size: int, max_blocks: int, caching: bool) -> None:
        self._pool = pool
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._caching = caching
        self._pinned = 0
        self._by_name: dict[str, Lease] = {}
        self._by_seq: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def reserve(self, name: str, seq_id: str, prompt: Prompt, end: int, margin: int) -> Lease:
        """Match and pin, leaving ``margin`` blocks free; raises ``NoSpace`` or ``Conflict``, and then takes nothing."""
        if seq_id in self._by_seq:
            raise Conflict(f"seq_id: {seq_id} is in use on this engine; abort it or choose another", "seq_id")
        hashes = prompt.hashes(self._block_size) if self._caching else []
        matched = self._pool.match(hashes, end // self._block_size)
        # One token more than is received, so that decoding can begin.
        needed = end // self._block_size + 1
        if self._pinned + needed > self._max_blocks:
            raise NoSpace(f"{needed} blocks on top of {self._pinned} under lease exceed {self._max_blocks}")
        if not self._pool.fits(hashes, matched, needed - matched + margin):
            raise NoSpace(f"{needed} blocks are needed and {self._pool.free} are free")
        lease = Lease(name, seq_id, prompt, end, matched * self._block_size)
        self._pool.pin(lease.holding, hashes, matched)
        self._pool.take(lease.holding, needed - matched)
        self._pinned += needed
        self._by_name[name] = self._by_seq[seq_id] = lease
        return lease

    def extend(self, lease: Lease, prompt: Prompt, end: int, margin: int) -> None:
        """Pin more for an open lease, up to ``end`` of ``prompt``, which begins with its own.

        Raises ``NoSpace``, and then takes nothing.
        """
        more = end // self._block_size - lease.end // self._block_size
        if self._pinned + more > self._max_blocks:
            raise NoSpace(f"{more} blocks on top of {self._pinned} under lease exceed {self._max_blocks}")
        if not self._pool.fits([], 0, more + margin):
            raise NoSpace(f"{more} blocks are needed and {self._pool.free} are free")
        self._pool.take(lease.holding, more)
        self._pinned += more
        lease.prompt, lease.end = prompt, end

    def find(self, name: str) -> Lease | None:
        """The lease, while it lasts."""
        return self._by_name.get(name)

    def of(self, seq_id: str) -> Lease | None:
        """The sequence's lease, while it lasts."""
        return self._by_seq.get(seq_id)

    def end(self, lease: Lease) -> None:
        """Take a lease off the books; its blocks are now the caller's to hand over or give back."""
        if lease.timer is not None:
            lease.timer.cancel()
        del self._by_name[lease.name], self._by_seq[lease.seq_id]
        self._pinned -= lease.holding.blocks

    def publish(self, lease: Lease) -> None:
        """Make what arrived findable; between steps."""
        if self._caching:
            hashes = lease.prompt.hashes(self._block_size)
            self._pool.publish(lease.holding, hashes[: lease.valid_end // self._block_size])

    def give_back(self, lease: Lease) -> None:
        """Free an ended lease's blocks; what arrived stays cached. Between steps."""
        self.publish(lease)
        self._pool.give_back(lease.holding)

    def drop_all(self) -> None:
        """End every lease without giving anything back: the pool is lost."""
        for lease in list(self._by_name.values()):
            self.end(lease)
