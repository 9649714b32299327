"""The blocks of a store, as the verbs need them: :class:`StoreBlocks` is the scheduler's half of an engine without one.

What arrives under a lease enters memory as soon as it is whole on every rank, and is then written to disk, behind. A
send reads what is on disk into memory first. Memory and disk evict independently: the store holds what either has.
Nothing waits for a disk longer than :data:`DISK_SECONDS`; what is not there by then is a miss.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tercet.aio.files import FileThread
from tercet.aio.tasks import Failures, TaskSet
from tercet.engine.interface import KeyedPrompt, PinnedPrefix, RequestInCore, ReservedBlocks
from tercet.protocol import Content, NoSpace, UnknownSequence
from tercet.store.contents import BlockContent, contents_of
from tercet.store.disk import DiskFolder, DiskIndex
from tercet.store.pool import MemoryPool
from tercet.transport import KVRegion, Push, SendPlan

logger = logging.getLogger(__name__)
DISK_SECONDS = 5.0
"""Longest wait of a send for the disk; the send ends before the first block that is not in memory by then."""
WRITES_WAITING = 4096
READERS = 2
ANY_TIME = 1e9

hits = Counter("tercet_store_hit_blocks", "Blocks that were asked for and sent, by where they were.", ["medium"])
misses = Counter("tercet_store_missed_blocks", "Blocks that were asked for and not sent.")
stored = Counter("tercet_store_stored_blocks", "Blocks that arrived and were not held before.")
evicted = Counter("tercet_store_evicted_blocks", "Blocks that made room for others, by where they were.", ["medium"])
damaged = Counter("tercet_store_damaged_blocks", "Blocks whose file is damaged or cannot be read; they were deleted.")
unwritten = Counter("tercet_store_unwritten_blocks", "Blocks that were not written to disk: it is slow, full or gone.")
MEMORY, DISK = "memory", "disk"
TIERS = {MEMORY: "cpu", DISK: "storage"}
"""The names of media in KV events."""


@dataclass
class HeldLease:
    """A lease: the contents of its prompt's whole blocks, and its slots, of which the first ``entered`` are entries."""

    prompt: KeyedPrompt
    contents: list[BlockContent]
    begin: int
    matched: list[int]  # pinned slots of blocks that were in memory before
    slots: list[int]
    settled: int = 0  # how many of the slots hold whole blocks whose contents do not change any more
    entered: list[int] = field(default_factory=list[int])


class StoreBlocks:
    """A :class:`~tercet.engine.interface.SchedulerHalf` over the ranks' ``regions``, each of as many blocks.

    ``on_stored`` gets the contents of each block that a medium has from now on, ``on_removed`` the name of each that it
    does not have any more; both get the medium's tier. Without a ``folder`` nothing is kept on disk, else at most
    ``disk_bytes``.
    """

    def __init__(
        self, regions: Sequence[KVRegion], block_size: int, folder: DiskFolder | None = None, disk_bytes: int = 0
    ) -> None:
        self._regions = regions
        self._size = block_size
        self.folder = folder
        self.on_stored: Callable[[BlockContent, str], object] = lambda content, tier: None
        self.on_removed: Callable[[bytes, str], object] = lambda name, tier: None
        self.held: dict[bytes, BlockContent] = {}  # by name, in memory, on disk, or both
        self.pool = MemoryPool[bytes](regions[0].shape.num_blocks, self._evicted)
        self.disk = DiskIndex[str](disk_bytes)
        self.leases: dict[str, HeldLease] = {}
        self._sends: dict[str, list[int]] = {}
        self._loads: dict[bytes, asyncio.Task[None]] = {}
        self._to_write: OrderedDict[bytes, None] = OrderedDict()
        self._written = asyncio.Event()
        self._writing = 0
        self._readers = [FileThread(ANY_TIME, DISK_SECONDS) for _ in range(READERS)]
        self._writer = FileThread(ANY_TIME, DISK_SECONDS)
        self._failures = Failures("write of KV to disk")
        self._tasks = TaskSet()

    def scan(self) -> None:
        """Note what is on disk, which takes a while; call it before all else."""
        if self.folder is None:
            return
        gone = list[str]()
        for file, size, content in self.folder.scan():
            surplus = self.disk.surplus(size) or []
            self._gone_from_disk(surplus)
            gone += surplus
            if size <= self.disk.limit:
                self.disk.add(file, size)
                if content is not None:
                    self.held[content.name] = content
        self.folder.delete(gone)
        logger.info("found %d blocks on disk, %d bytes", len(self.disk), self.disk.nbytes)

    def start(self) -> None:
        if self.folder is not None:
            self._tasks.keep(self._write_behind, "writes of KV to disk")

    # ---- leases ------------------------------------------------------------------------------------------------------

    async def reserve(self, lease: str, prompt: KeyedPrompt) -> ReservedBlocks:
        contents = contents_of(prompt, self._size)
        known = next((at for at, each in enumerate(contents) if each.name not in self.held), len(contents))
        begin = known * self._size
        matched = [slot for each in contents[:known] if (slot := self.pool.slot(each.name)) is not None]
        # Pinned first: the next line may evict, and must not evict the beginning of the same prompt.
        self.pool.pin(matched)
        try:
            slots = self.pool.take(-(-(len(prompt.tokens) - begin) // self._size))
        except NoSpace:
            self.pool.unpin(matched)
            raise
        self.leases[lease] = HeldLease(prompt, contents, begin, matched, slots)
        return ReservedBlocks(begin, [slots], self._size)

    async def give_up(self, lease: str) -> None:
        """Do nothing: a reservation never waits."""

    async def extend(self, lease: str, prompt: KeyedPrompt) -> ReservedBlocks:
        held = self._lease(lease)
        contents = contents_of(prompt, self._size)
        needed = -(-(len(prompt.tokens) - held.begin) // self._size)
        held.slots = [*held.slots, *self.pool.take(needed - len(held.slots))]
        held.prompt, held.contents = prompt, contents
        return ReservedBlocks(held.begin, [held.slots], self._size)

    async def commit(self, lease: str, valid: Content) -> None:
        held = self.leases.get(lease)
        if held is not None:  # otherwise it was released meanwhile
            held.prompt.require(valid, lease)
            self._enter(held, valid.end)

    async def release(self, lease: str, valid_end: int) -> int:
        held = self._lease(lease)
        del self.leases[lease]
        self._enter(held, valid_end)
        entered = {*held.entered}
        self.pool.give_back([slot for slot in held.slots if slot not in entered])
        self.pool.unpin([*held.matched, *held.entered])
        return valid_end

    def _lease(self, lease: str) -> HeldLease:
        held = self.leases.get(lease)
        if held is None:
            raise UnknownSequence(f"lease {lease} is not held here", "lease")
        return held

    def _enter(self, held: HeldLease, valid_end: int) -> None:
        """Make the whole blocks up to ``valid_end`` entries; a block that is in memory already is not kept twice."""
        first = held.begin // self._size
        for at in range(held.settled, max(held.settled, (valid_end - held.begin) // self._size)):
            content, slot = held.contents[first + at], held.slots[at]
            if content.name not in self.pool:
                self.pool.enter(slot, content.name)
                held.entered.append(slot)
                self._note(content)
            held.settled = at + 1

    def _note(self, content: BlockContent) -> None:
        """Note a block that has entered memory, and queue its write to disk."""
        if content.name not in self.held:
            self.held[content.name] = content
            stored.inc()
        self.on_stored(content, TIERS[MEMORY])
        if self.folder is not None and not self._is_on_disk(content.name):
            self._to_write[content.name] = None
            # A disk that is slower than the network loses the oldest writes instead of growing memory.
            if len(self._to_write) > WRITES_WAITING:
                self._to_write.popitem(last=False)
                unwritten.inc()
            self._written.set()

    def _evicted(self, name: bytes) -> None:
        evicted.labels(MEMORY).inc()
        self._to_write.pop(name, None)
        self._forget(name, MEMORY)

    def _forget(self, name: bytes, medium: str) -> None:
        """Forget a block that a medium does not have any more, for good if neither memory nor disk has it."""
        if name in self.held:
            self.on_removed(name, TIERS[medium])
        if name not in self.pool and not self._is_on_disk(name):
            self.held.pop(name, None)

    def _is_on_disk(self, name: bytes) -> bool:
        return self.folder is not None and self.folder.file(name) in self.disk

    def held_by_tier(self) -> Iterator[tuple[BlockContent, str]]:
        """Yield the contents of each block, with each tier that has it."""
        for name, content in self.held.items():
            if name in self.pool:
                yield content, TIERS[MEMORY]
            if self._is_on_disk(name):
                yield content, TIERS[DISK]

    # ---- sends -------------------------------------------------------------------------------------------------------

    async def push_cached(self, prompt: KeyedPrompt, send: SendPlan) -> list[Push] | None:
        found = await self.push_longest(prompt, send)
        if found.end == send.end:
            return found.pushes
        # All or nothing was asked for: what was pinned for the shorter send is given back.
        await self.end_send(send.send_id)
        return None

    async def push_longest(self, prompt: KeyedPrompt, send: SendPlan) -> PinnedPrefix:
        first, until = send.begin // self._size, send.end // self._size
        contents = contents_of(prompt, self._size)[:until]
        self._touch(contents)
        slots = await self._pinned(contents[first:])
        if not slots:
            return PinnedPrefix(send.begin, [])
        self._sends[send.send_id] = slots
        push = Push(send.send_id, first - send.base // self._size, tuple(slots))
        return PinnedPrefix((first + len(slots)) * self._size, [push])

    async def end_send(self, send_id: str) -> None:
        self.pool.unpin(self._sends.pop(send_id, []))

    async def sequences(self) -> list[RequestInCore]:
        return []

    async def _pinned(self, wanted: Sequence[BlockContent]) -> list[int]:
        """Return pinned slots of the first of these blocks, up to one that is missing or not read in time."""
        here = [self.pool.slot(each.name) for each in wanted]
        pinned = [slot for slot in here if slot is not None]
        self.pool.pin(pinned)  # before the others are read, which may evict
        try:
            loads = [self._loading(each) for each, slot in zip(wanted, here, strict=True) if slot is None]
            if running := [each for each in loads if each is not None]:
                await asyncio.wait(running, timeout=DISK_SECONDS)
            found = list[int]()
            for content in wanted:
                slot = self.pool.slot(content.name)
                if slot is None:
                    break
                found.append(slot)
            # A second pin, which the send gives back; the first ones end here.
            self.pool.pin(found)
        finally:
            self.pool.unpin(pinned)
        for slot in here[: len(found)]:
            hits.labels(DISK if slot is None else MEMORY).inc()
        misses.inc(len(wanted) - len(found))
        return found

    def _touch(self, contents: Sequence[BlockContent]) -> None:
        """Note a use of a prompt's blocks: those at its end are evicted first."""
        for content in reversed(contents):
            self.pool.touch(content.name)
            if self.folder is not None:
                # On disk too: a block that memory serves for hours must not be the first that the disk deletes.
                self.disk.touch(self.folder.file(content.name))

    # ---- disk --------------------------------------------------------------------------------------------------------

    def _loading(self, content: BlockContent) -> asyncio.Task[None] | None:
        """Return the task that reads a block from disk; None if it is not there, or there is no room in memory."""
        task = self._loads.get(content.name)
        folder = self.folder
        if task is not None or folder is None or folder.file(content.name) not in self.disk:
            return task
        try:
            (slot,) = self.pool.take(1)
        except NoSpace:
            return None
        task = self._loads[content.name] = self._tasks.spawn(self._load(folder, content, slot))
        task.add_done_callback(lambda _: self._loads.pop(content.name, None))
        return task

    async def _load(self, folder: DiskFolder, content: BlockContent, slot: int) -> None:
        # The slot belongs to this task until the thread has ended, however long that takes.
        file, reader = folder.file(content.name), self._readers[slot % READERS]
        good = False
        try:
            good = await reader.run(folder.read, content, self._parts(slot))
            if not good:
                damaged.inc()
        except FileNotFoundError:  # it has made room meanwhile, or others have deleted it
            pass
        except OSError as error:  # a timeout is one: the disk is stuck, and may come back
            self._failures.log(error)
            self.pool.give_back([slot])
            return
        # The file is damaged or gone. The prompt ends here for this caller, who computes the rest.
        if not good and file in self.disk:
            self.disk.remove(file)
            self._forget(content.name, DISK)
        if good and content.name not in self.pool:
            self.pool.enter(slot, content.name)
            self.pool.unpin([slot])
            self.on_stored(content, TIERS[MEMORY])
        else:
            self.pool.give_back([slot])

    async def _write_behind(self) -> None:
        while True:
            while self._to_write:
                name, _ = self._to_write.popitem()  # the newest first: a prompt's end then leaves before its beginning
                slot = self.pool.slot(name)
                if slot is not None and self.folder is not None:
                    await self._write(self.folder, self.held[name], slot)
            self._written.clear()
            await self._written.wait()

    async def _write(self, folder: DiskFolder, content: BlockContent, slot: int) -> None:
        file = folder.file(content.name)
        surplus, gone = self.disk.surplus(folder.size_of(content)), list[str]()
        if surplus is None:
            unwritten.inc()
            return
        self.pool.pin([slot])  # until the thread has ended
        self._writing = 1
        try:
            size = await self._writer.run(_replace, folder, surplus, gone, content, self._parts(slot))
        except OSError as error:
            self._gone_from_disk(gone)
            unwritten.inc()
            self._failures.log(error)
        else:
            self._gone_from_disk(gone)
            self._failures.works()
            if file not in self.disk:
                self.on_stored(content, TIERS[DISK])
            self.disk.add(file, size)
        finally:
            self._writing = 0
            self.pool.unpin([slot])
        for each in surplus:
            self.disk.touch(each)  # one that cannot be deleted is still served, and others are tried before it

    def _gone_from_disk(self, files: Sequence[str]) -> None:
        """Forget files that made room; what was deleted, not what should be: a read-only disk keeps its blocks."""
        for file in files:
            if file not in self.disk:
                continue  # a read has missed it before
            evicted.labels(DISK).inc()
            self.disk.remove(file)
            kind, _, name = file.rpartition("/")
            if self.folder is not None and kind == self.folder.kind:  # blocks of other weights have the same names
                self._forget(bytes.fromhex(name), DISK)

    def _parts(self, slot: int) -> list[memoryview]:
        """Return a block's memory: of each rank, plane by plane."""
        return [region.blocks(plane, slot) for region in self._regions for plane in range(region.num_layers)]

    # ---- state -------------------------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """Return fields of :class:`~tercet.protocol.EngineStatus`; blocks without a pin can be used."""
        return {
            "total_blocks": self.pool.slots,
            "free_blocks": self.pool.available,
            "running": 0,
            "waiting": 0,
            "kv_cache_usage": self.usage,
            "leases": len(self.leases),
            "sends": len(self._sends),
        }

    @property
    def waiting_writes(self) -> int:
        """Number of blocks that wait for their write to disk, or are being written."""
        return len(self._to_write) + self._writing

    @property
    def usage(self) -> float:
        """The share of memory that is pinned."""
        return 1 - self.pool.available / self.pool.slots

    async def close(self) -> None:
        """Stop to write; what waits is lost."""
        await self._tasks.close()
        for thread in (*self._readers, self._writer):
            thread.close()
        if self.folder is not None:
            self.folder.close()


def _replace(
    folder: DiskFolder, surplus: Sequence[str], gone: list[str], content: BlockContent, parts: Sequence[memoryview]
) -> int:  # fmt: skip
    """Delete files and write a block; ``gone`` gets those that are deleted, also if the write fails."""
    gone += folder.delete(surplus)
    if len(gone) < len(surplus):
        raise OSError("a file that was to make room cannot be deleted")
    return folder.write(content, parts)


class StoreCollector(Collector):
    """Gauges of what a store holds now."""

    def __init__(self, blocks: StoreBlocks) -> None:
        self._blocks = blocks

    def collect(self) -> Iterable[Metric]:
        held = GaugeMetricFamily("tercet_store_blocks", "Blocks that the store holds, by medium.", labels=["medium"])
        held.add_metric([MEMORY], len(self._blocks.pool))
        held.add_metric([DISK], len(self._blocks.disk))
        yield held
        yield GaugeMetricFamily("tercet_store_disk_bytes", "Bytes of files on disk.", value=self._blocks.disk.nbytes)
