"""A simulated store: KV in host memory and on a disk, in virtual time, behind the verbs of ``tercet store``.

The real store's :class:`~tercet.store.pool.MemoryPool` and :class:`~tercet.store.disk.DiskIndex` decide what it evicts.
A disk reads and writes one block after the other, at the same rate in both
directions at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NoReturn

from tercet.decisions.scheduling.plugin import block_hashes
from tercet.engine.leases import check_range, end_of_reservation, require_continued
from tercet.protocol import (
    BadRequest,
    EngineLoad,
    EngineStatus,
    EngineUnreachable,
    LeaseEnded,
    NoSpace,
    Request,
    Reservation,
    Sent,
    Usage,
    resolve_range,
)
from tercet.protocol.types import resolve_end
from tercet.store.blocks import DISK_SECONDS, WRITES_WAITING
from tercet.store.disk import DiskIndex
from tercet.store.pool import MemoryPool
from tercet_lab.sim.block_pool import SimObserver
from tercet_lab.sim.engine_options import StoreSpec, check_prompt
from tercet_lab.sim.leases import PromptLease, PromptLeases
from tercet_lab.sim.network import Network, Node, Send
from tercet_lab.sim.step_times import Profile

LEASE_TTL = 60.0


@dataclass(eq=False, slots=True)
class StoredLease(PromptLease):
    """Slots for the tokens from ``matched`` on; the prompt's whole blocks have ``names``."""

    names: Sequence[int] = ()
    pinned: list[int] = field(default_factory=list[int])  # slots of blocks that were in memory before
    slots: list[int] = field(default_factory=list[int])
    arrived: int = 0
    settled: int = 0  # how many of the slots hold whole blocks
    entered: list[int] = field(default_factory=list[int])

    @property
    def valid_end(self) -> int:
        return self.arrived


class StoredLeases(PromptLeases[StoredLease]):
    """The leases of a store with this ``memory``."""

    def __init__(self, memory: MemoryPool[int]) -> None:
        super().__init__()
        self._memory = memory

    def end(self, lease: StoredLease, error: LeaseEnded | None = None) -> None:
        """Give back what a lease has; whole blocks that have arrived stay."""
        if self.remove(lease):
            self._memory.give_back(lease.slots[lease.settled :])
            self._memory.unpin([*lease.pinned, *lease.entered])


class SimStore(Node[StoredLeases]):
    """One store in virtual time, with the layout of engines of ``profile``, which can fail, restart and freeze.

    Raise :class:`~tercet.protocol.BadRequest` if it cannot hold one block.
    """

    def __init__(self, name: str, profile: Profile, network: Network, spec: StoreSpec) -> None:
        super().__init__(name, profile, network, LEASE_TTL, None)
        self._spec = spec
        self.counts = Counter[str]()
        self._size = size = profile.block_size
        if spec.tokens < size:
            raise BadRequest(f"fleet: stores: tokens: is {spec.tokens}, and one block has {size}", "fleet")
        self._block_seconds = size * profile.model.kv_bytes_per_token / spec.disk_rate
        self._observer: SimObserver | None = None
        self._evicted: list[int] = []
        self.disk = DiskIndex[int](spec.disk_tokens // size)  # each block counts as one
        self._answers = asyncio.Event()
        self._answers.set()
        self._frozen_at: float | None = None
        self._start()
        network.add(self)

    def _start(self) -> None:
        super()._start()
        self.memory = MemoryPool[int](self._spec.tokens // self._size, self._evicted.append)
        self._leases = StoredLeases(self.memory)
        self._writes: deque[tuple[float, int]] = deque()  # when each write ends, in order
        self._written = self._read = self._loop.time()  # when the disk is free
        self._loads: dict[int, asyncio.Future[None]] = {}

    # ---- failures ----------------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """Simulate a crash: calls and sends end with ``EngineUnreachable``; memory and leases are lost, files stay."""
        self._settle()
        self._down = True
        self._answers.set()
        for lease in self._leases:
            self._leases.remove(lease)
        self._end_sends(EngineUnreachable(f"{self.name} went down"))
        for load in set(self._loads.values()):
            load.set_result(None)

    def recover(self) -> None:
        """Restart after :meth:`fail`, with what is on disk. Do nothing if the store is not down."""
        if self._down:
            self._start()
            self._down, self._frozen_at = False, None
            if self._observer is not None:
                self._observer.cleared()
                self._observer.stored(list(self.disk))

    def freeze(self) -> None:
        """Stop as SIGSTOP does: no call is answered."""
        self._answers.clear()
        self._frozen_at = self._loop.time()

    def thaw(self) -> None:
        """Continue after :meth:`freeze`, as SIGCONT does."""
        self._answers.set()
        self._frozen_at = None

    async def _reach(self) -> None:
        await super()._reach()
        await self._answers.wait()
        if self._down:  # it has failed while it was frozen
            raise EngineUnreachable(f"{self.name} is down")

    # ---- state -------------------------------------------------------------------------------------------------------

    @property
    def computes(self) -> bool:
        """False: a store runs no steps."""
        return False

    @property
    def busy(self) -> bool:
        """True if a lease or a send exists here."""
        return bool(len(self._leases) or self._sends)

    @property
    def usage(self) -> float:
        """The share of memory that is pinned."""
        return 1 - self.memory.available / self.memory.slots

    def load(self) -> EngineLoad:
        """Return the load now, in the form that routers receive."""
        stalled = 0.0 if self._frozen_at is None else self._loop.time() - self._frozen_at
        return EngineLoad(waiting=0, running=0, kv_usage=self.usage, stalled_s=stalled)

    def observe_blocks(self, observer: SimObserver) -> None:
        """Notify ``observer`` of the blocks that the store holds, now and from now on."""
        self._observer = observer
        observer.stored([*self.memory, *(name for name in self.disk if name not in self.memory)])

    async def status(self) -> EngineStatus:
        await self._reach()
        return self._status(
            total_blocks=self.memory.slots, free_blocks=self.memory.available, running=0, waiting=0,
            kv_cache_usage=self.usage, leases=len(self._leases), is_store=True,
        )  # fmt: skip

    # ---- leases ------------------------------------------------------------------------------------------------------

    async def _lease(self, request: Request, end: int | None, ttl: float) -> StoredLease:
        await self._arrive(request)
        resolved = end_of_reservation(request.num_tokens, end)
        names = block_hashes(request, self._size, resolved // self._size)
        prompt = self.network.prompt(request.prompt, request.cache_salt, request.adapter)
        name = f"{self.name}:{next(self._lease_numbers)}"
        lease = StoredLease(prompt, resolved, names=names, name=name, seq_id=request.seq_id, ttl=ttl)
        self._leases.add(lease)
        known = list(takewhile(self._holds, names))
        lease.matched = lease.arrived = len(known) * self._size
        lease.pinned = self._slots(known)
        self.memory.pin(lease.pinned)
        try:
            lease.slots = self._take(-(-(resolved - lease.matched) // self._size))
        except NoSpace:
            self._leases.end(lease)
            raise
        self._leases.renew(lease)
        return lease

    async def extend(self, lease: str, request: Request, end: int | None) -> tuple[Reservation, float]:
        await self._arrive(request)
        found = self._leases.require(lease, request.seq_id)
        require_continued(found.prompt.tokens[: found.end], request.prompt, "")
        until = resolve_end(request.num_tokens, end)
        found.slots += self._take(max(0, -(-(until - found.matched) // self._size) - len(found.slots)))
        found.prompt = self.network.prompt(request.prompt, request.cache_salt, request.adapter)
        found.names, found.end = block_hashes(request, self._size, until // self._size), max(found.end, until)
        self._leases.renew(found)
        return self._extended(found)

    def take_in(self, lease: str, begin: int, end: int) -> None:
        found = self._leases.find(lease)
        if found is not None and begin <= found.arrived:
            found.arrived = max(found.arrived, end)
            self._enter(found)

    def _enter(self, lease: StoredLease) -> None:
        """Make the whole blocks that have arrived entries; a block that is in memory already is not kept twice."""
        self._settle()
        first, fresh, spare = lease.matched // self._size, list[int](), list[int]()
        for at in range(lease.settled, (lease.arrived - lease.matched) // self._size):
            name, slot = lease.names[first + at], lease.slots[at]
            if name in self.memory:
                spare.append(slot)
                continue
            if name not in self.disk:
                fresh.append(name)
                self._write(name)
            self.memory.enter(slot, name)
            lease.entered.append(slot)
        lease.settled = (lease.arrived - lease.matched) // self._size
        self.memory.give_back(spare)
        self.counts["stored_tokens"] += len(fresh) * self._size
        if fresh and self._observer is not None:
            self._observer.stored(fresh)

    # ---- sends -------------------------------------------------------------------------------------------------------

    async def remote_send(
        self, request: Request, to: Reservation, begin: int, end: int | None = None, sample: bool = False,
        cached_only: bool = False,
    ) -> Sent:  # fmt: skip
        began = self._loop.time()
        await self._arrive(request)
        if not cached_only:
            raise BadRequest("cached_only: must be true here, as a store computes nothing", "cached_only")
        begin, end = resolve_range(request.num_tokens, begin, to.end if end is None else end)
        info = to.kv_addr_info
        check_range(info, begin, end, request.num_tokens, sample, self._layout, cached_only)
        names, first = block_hashes(request, self._size, end // self._size), begin // self._size
        for name in reversed(names):  # a use: the end of a prompt is evicted before its beginning
            self.memory.touch(name)
            self.disk.touch(name)
        memory, slots = self.memory, await self._pinned(names[first:])
        try:
            self.counts["sent_tokens"] += len(slots) * self._size
            self.counts["missed_tokens"] += (len(names) - first - len(slots)) * self._size
            end = (first + len(slots)) * self._size
            if end <= begin:
                return Sent(begin, begin, 0, 0, self._loop.time() - began, Usage())
            prompt = self.network.prompt(request.prompt, request.cache_salt, request.adapter)
            send = Send(self, self.network.find(info), info.lease, prompt, first * self._size, end)
            self._sends[send] = request.seq_id
            try:
                send.all_at_once()
                await send.done
            finally:
                del self._sends[send]
            return Sent(begin, end, send.bytes, send.chunks, self._loop.time() - began, Usage(cached=end))
        finally:
            memory.unpin(slots)

    async def _pinned(self, names: Sequence[int]) -> list[int]:
        """Return pinned slots of the first of these blocks, up to one that is missing or not read in time."""
        self._settle()
        memory, held = self.memory, list(takewhile(self._holds, names))
        pinned = self._slots(held)
        memory.pin(pinned)  # the others' reads may evict
        try:
            loads = {self._loads[name] for name in held if name in self._loads}
            absent = [name for name in held if name not in memory and name not in self._loads]
            if (load := self._reading(absent)) is not None:
                loads.add(load)
            if loads:
                await asyncio.wait(loads, timeout=DISK_SECONDS)
            if self._down or self.memory is not memory:
                raise EngineUnreachable(f"{self.name} went down")
            found = self._slots(list(takewhile(memory.__contains__, held)))
            memory.pin(found)
        finally:
            memory.unpin(pinned)
        return found

    def start_generate(self, request: Request, begin: int = 0, output: Sequence[int] = ()) -> NoReturn:
        raise BadRequest("start_generate: a store computes nothing; call an engine", "seq_id")

    async def _arrive(self, request: Request) -> None:
        await self._reach()
        check_prompt(request, self.profile.max_model_len)
        self._settle()

    # ---- memory and disk ---------------------------------------------------------------------------------------------

    def _holds(self, name: int) -> bool:
        return name in self.memory or name in self.disk

    def _slots(self, names: Collection[int]) -> list[int]:
        return [slot for name in names if (slot := self.memory.slot(name)) is not None]

    def _take(self, blocks: int) -> list[int]:
        slots = self.memory.take(blocks)
        gone = [name for name in self._evicted if name not in self.disk]
        self._evicted.clear()
        if gone and self._observer is not None:
            self._observer.dropped(gone)
        return slots

    def _write(self, name: int) -> None:
        """Queue the write of a block to disk. Unlike the real store, a full queue drops the newest block."""
        if self.disk.limit and len(self._writes) < WRITES_WAITING:
            self._written = max(self._written, self._loop.time()) + self._block_seconds
            self._writes.append((self._written, name))

    def _settle(self) -> None:
        """Note the writes that have ended by now; a block that left memory before was not written."""
        now = self._loop.time()
        while self._writes and self._writes[0][0] <= now:
            _, name = self._writes.popleft()
            if name not in self.memory:
                continue
            gone = [old for old in self.disk.make_room(1) or () if old not in self.memory]
            self.disk.add(name, 1)
            if gone and self._observer is not None:
                self._observer.dropped(gone)

    def _reading(self, names: Sequence[int]) -> asyncio.Future[None] | None:
        """Begin to read the first of these blocks from disk, those that can be there in time; None if none can."""
        now = self._loop.time()
        begin = max(self._read, now)
        some = names[: min(self.memory.available, int((now + DISK_SECONDS - begin) / self._block_seconds))]
        if not some:
            return None
        slots, load = self._take(len(some)), self._loop.create_future()
        self._loads |= dict.fromkeys(some, load)
        self._read = begin + len(some) * self._block_seconds
        self._loop.call_at(self._read, self._loaded, self.memory, some, slots, load)
        return load

    def _loaded(
        self, memory: MemoryPool[int], names: Sequence[int], slots: Sequence[int], load: asyncio.Future[None]
    ) -> None:  # fmt: skip
        if memory is not self.memory or load.done():
            return  # the store went down
        fresh = list[int]()
        for name, slot in zip(names, slots, strict=True):
            del self._loads[name]
            if name in memory:
                memory.give_back([slot])
            else:
                memory.enter(slot, name)
                fresh.append(slot)
        memory.unpin(fresh)
        self.counts["read_tokens"] += len(names) * self._size
        load.set_result(None)
