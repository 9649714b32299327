"""Copies through buffers and across, on devices that carry them out late and in any order that CUDA allows."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import groupby

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.protocol import TransferFailed
from tercet.transport import BlockOrder, KVRegion, RankTransport, RegionShape, TransportSettings, staged
from tercet.transport.backends import tcp
from tercet.transport.region import Numbers, rearranged
from tercet.transport.staged import BUFFERS, DeviceLost, IsOver, StagedMemory, wait_until
from tercet.transport.torch_blocks import CopyDevice, CudaDevice, PeerBlocks, Planes, Side, TorchBlocks, host_planes
from tests.unit.transport.memory.lazy_device import LazyDevice
from tests.unit.transport.ranks import FINGERPRINT, content, expected_after, filled, idle, settle, transfer

LAYERS, BLOCKS, BYTES = 3, 24, 12 * 1024
CHUNK = 3 * BYTES


@pytest.fixture(scope="module", autouse=True)
def _small_chunks() -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tcp, "MAX_CHUNK_BYTES", CHUNK)
        patch.setattr(tcp, "LEAST_CHUNK_BYTES", BYTES)
        yield


def memory_of(region: KVRegion, device: CopyDevice, order: BlockOrder | None = None) -> StagedMemory:
    return StagedMemory(TorchBlocks(host_planes(region), CHUNK, order, device=device), region.shape, CHUNK)


class Mapped(TorchBlocks):
    """Blocks that map those of ``theirs``."""

    def __init__(self, region: KVRegion, device: CopyDevice, theirs: KVRegion | None) -> None:
        def opened(offer: bytes, shape: RegionShape, mapped_for: CopyDevice) -> Sequence[torch.Tensor]:
            assert mapped_for is device
            if theirs is None:
                raise TransferFailed("ipc: not here")
            return host_planes(theirs)

        super().__init__(host_planes(region), CHUNK, offer=b"it", open_planes=opened, device=device)


@contextmanager
def on_device(region: KVRegion, memory: StagedMemory, transport: str = "tcp") -> Generator[RankTransport]:
    found = RankTransport(region, FINGERPRINT, TransportSettings(transport), staged=memory)
    try:
        yield found
    finally:
        found.close()
        region.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("across", [True, False], ids=["ipc", "tcp"])
def test_blocks_arrive_whenever_devices_get_round_to_it(across: bool, seed: int) -> None:
    source, target = filled(LAYERS, BLOCKS, BYTES, 1), filled(LAYERS, BLOCKS, BYTES, 2)
    before, random = content(target), np.random.default_rng(seed)
    sources, targets = (random.permutation(BLOCKS)[:17].tolist() for _ in range(2))
    memories = [
        StagedMemory(Mapped(here, LazyDevice(seed), there), here.shape, CHUNK)
        for here, there in ((source, target), (target, source))
    ]
    way = "ipc" if across else "tcp"
    with on_device(source, memories[0], way) as sender, on_device(target, memories[1], way) as receiver:
        assert transfer(sender, source, receiver, sources, targets).transport == way
        # The send is over, so all of it is there: nothing waits for the devices any more.
        assert content(target) == expected_after(before, source, sources, targets)
        idle(sender, receiver)
        assert all(each.buffers_free() == (BUFFERS, BUFFERS) for each in memories)


def test_a_mapping_is_gone_with_its_session() -> None:
    """Whoever is started in the place of an engine that has died needs the memory that others had mapped."""
    source, target = filled(LAYERS, BLOCKS, BYTES, 1), filled(LAYERS, BLOCKS, BYTES, 2)
    blocks = Mapped(target, LazyDevice(1), source)
    opened: list[weakref.ref[PeerBlocks]] = []
    open_them = blocks.opened

    def opened_once(offer: bytes, shape: RegionShape) -> PeerBlocks:
        found = open_them(offer, shape)
        opened.append(weakref.ref(found))
        return found

    blocks.opened = opened_once  # type: ignore[method-assign]
    theirs = StagedMemory(Mapped(source, LazyDevice(2), None), source.shape, CHUNK)
    with on_device(target, StagedMemory(blocks, target.shape, CHUNK), "ipc") as receiver:
        with on_device(source, theirs, "ipc") as sender:
            transfer(sender, source, receiver, [1], [2])
            assert opened[0]() is not None
        settle(lambda: opened[0]() is None)


@pytest.mark.slow
def test_both_ways_at_once_and_several_at_a_time() -> None:
    one, other = filled(LAYERS, BLOCKS, BYTES, 1), filled(LAYERS, BLOCKS, BYTES, 2)
    before = content(one), content(other)
    here, there = list(range(12)), list(range(12, 24))
    with (
        on_device(one, memory_of(one, LazyDevice(1))) as first,
        on_device(other, memory_of(other, LazyDevice(2))) as second,
    ):
        threads = [
            threading.Thread(target=transfer, args=(first, one, second, here, there)),
            threading.Thread(target=transfer, args=(second, other, first, here, there)),
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
        assert content(other) == expected_after(before[1], one, here, there)
        assert content(one) == expected_after(before[0], other, here, there)


Job = tuple[bool, list[int], int]
JOBS = st.lists(
    st.tuples(
        st.booleans(),
        st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=CHUNK // BYTES, unique=True),
        st.integers(0, LAYERS - 1),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=settings().max_examples * 2 // 5, deadline=None)
@given(seed=st.integers(0, 10_000), jobs=JOBS)
def test_copies_of_one_direction_may_be_begun_one_behind_the_other(seed: int, jobs: list[Job]) -> None:
    """There is one room on the device for all of them, and each has host memory of its own."""
    region = filled(LAYERS, BLOCKS, BYTES, 1)
    blocks = TorchBlocks(host_planes(region), CHUNK, device=LazyDevice(seed))
    model = [np.frombuffer(each, np.uint8).copy().reshape(BLOCKS, BYTES) for each in content(region)]
    random = np.random.default_rng(seed)
    for out, together in groupby(jobs, lambda job: job[0]):
        begun: list[tuple[IsOver, memoryview, bytes]] = []
        for _, numbers, layer in together:
            buffer, layers = blocks.buffer(len(numbers) * BYTES), range(layer, layer + 1)
            if out:
                over = blocks.begin_out(layers, np.array(numbers), 0, BYTES, buffer)
            else:
                model[layer][numbers] = given_bytes = random.integers(0, 256, (len(numbers), BYTES), dtype=np.uint8)
                buffer[:] = given_bytes.tobytes()
                over = blocks.begin_in(layers, np.array(numbers), 0, BYTES, buffer, None)
            begun.append((over, buffer, model[layer][numbers].tobytes()))
        for index in random.permutation(len(begun)):
            over, buffer, expected = begun[index]
            wait_until(over)
            assert bytes(buffer) == expected
    assert content(region) == [each.tobytes() for each in model]
    region.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fails", [False, True])
def test_chunks_that_are_copied_together_have_all_ended(seed: int, fails: bool) -> None:
    """Also if the device cannot begin one of them: nothing is written after that is raised."""
    source, target = filled(LAYERS, BLOCKS, BYTES, 1), filled(LAYERS, BLOCKS, BYTES, 2)
    before, device = content(target), LazyDevice(seed)
    memory, peer = memory_of(target, device), PeerBlocks(host_planes(source))
    chunks = [
        ((range(LAYERS), np.array([number]), 0), (range(LAYERS), np.array([number + 8]), 0), BYTES)
        for number in range(8)
    ]
    if fails:
        begun = iter(range(1_000))
        device.fails = lambda: RuntimeError("out of memory") if next(begun) == 20 else None
        with pytest.raises(TransferFailed, match="out of memory"):
            memory.copy_across(peer, chunks, None)
        now = content(target)
        assert now not in (before, expected_after(before, source, list(range(8)), list(range(8, 16))))
        for _ in range(100):
            device.work()
        assert content(target) == now
    else:
        assert memory.copy_across(peer, chunks, None) == 8 * LAYERS * BYTES
        assert content(target) == expected_after(before, source, list(range(8)), list(range(8, 16)))
    source.close()
    target.close()


@pytest.mark.parametrize("seed", range(4))
def test_items_are_put_into_another_order(seed: int) -> None:
    theirs, ours = BlockOrder("HN", 4, 16, BYTES // 64), BlockOrder("NH", 4, 16, BYTES // 64)
    source, target = filled(1, BLOCKS, BYTES, 1), filled(1, BLOCKS, BYTES, 2)
    sender = memory_of(source, LazyDevice(seed), theirs)
    receiver = memory_of(target, LazyDevice(seed + 1), ours)
    numbers, skipped = np.array([4, 9, 2]), np.array([7, -1, 3])
    before = content(target)
    room = receiver.room()
    with sender.reading(range(1), numbers, 0, BYTES) as found:
        owner = found._owners
        assert isinstance(owner, memoryview)
        room.bytes[: len(owner)] = owner
    receiver.put(room, range(1), skipped, 0, BYTES, rearranged(theirs, ours))
    for there, here in ((4, 7), (2, 3)):
        wanted = np.frombuffer(source.blocks(0, there), np.uint8).reshape(4, 16, -1).transpose(1, 0, 2)
        assert bytes(target.blocks(0, here)) == wanted.tobytes()
        before[0] = before[0][: here * BYTES] + wanted.tobytes() + before[0][(here + 1) * BYTES :]
    assert content(target) == before
    source.close()
    target.close()


class Impatient(TorchBlocks):
    """Takes what has begun for over."""

    def begin_out(self, layers: range, blocks: Numbers, offset: int, size: int, into: memoryview) -> IsOver:
        super().begin_out(layers, blocks, offset, size, into)
        return lambda: True


def test_a_wait_that_is_missing_is_seen() -> None:
    """Else none of these tests says anything."""
    region = filled(LAYERS, BLOCKS, BYTES, 1)
    blocks = Impatient(host_planes(region), CHUNK, device=LazyDevice(3))
    memory = StagedMemory(blocks, region.shape, CHUNK)
    with memory.reading(range(1), np.array([1, 2]), 0, BYTES) as found:
        assert bytes(found._owners) != bytes(region.blocks(0, 1, 2))  # type: ignore[arg-type]
    region.close()


# ---- devices that do not ---------------------------------------------------------------------------------------------


def test_what_could_not_begin_writes_nothing_after_it_was_told() -> None:
    """The device has no memory for a copy, of which a part was given to it already."""
    region, lazy = filled(1, BLOCKS, BYTES, 1), LazyDevice(5)
    memory = memory_of(region, lazy)
    room = memory.room()
    room.bytes[:] = bytes(len(room.bytes))
    after = lazy.given + 2
    lazy.fails = lambda: RuntimeError("CUDA out of memory") if lazy.given >= after else None
    with pytest.raises(TransferFailed, match="did not copy KV: CUDA out of memory"):
        memory.put(room, range(1), np.array([3, -1, 4]), 0, BYTES)
    assert not any(stream.waiting for stream in lazy.streams), "something may still be written"
    room.give_back()
    assert memory.buffers_free() == (BUFFERS, BUFFERS)
    lazy.fails = lambda: None
    assert isinstance(read(memory), bytes)
    region.close()


def read(memory: StagedMemory) -> bytes:
    with memory.reading(range(1), np.array([1]), 0, BYTES) as found:
        return bytes(found._owners)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["in", "out", "across"])
def test_an_engine_whose_device_is_lost_ends(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal access, say of a mapped peer that is gone, CUDA does nothing more for a process."""
    ended: list[bool] = []
    monkeypatch.setattr(staged, "end_process", lambda: ended.append(True))
    region, lazy = filled(1, BLOCKS, BYTES, 1), LazyDevice(5)
    memory, one = memory_of(region, lazy), np.array([1])

    def lost() -> Exception:
        return DeviceLost("the device no longer works for this process: an illegal memory access was encountered")

    lazy.fails = lost
    place = range(1), one, 0
    ways: dict[str, Callable[[], object]] = {
        "in": lambda: memory.put(memory.room(), range(1), one, 0, BYTES),
        "out": lambda: read(memory),
        "across": lambda: memory.copy_across(PeerBlocks(host_planes(region)), [(place, place, BYTES)], None),
    }
    with pytest.raises(DeviceLost):
        ways[way]()
    assert ended
    region.close()


def test_practice_leaves_the_cache_as_it_was() -> None:
    region = filled(LAYERS, BLOCKS, BYTES, 1)
    before, memory = content(region), memory_of(region, LazyDevice(7))
    memory.practise()
    assert content(region) == before
    assert memory.buffers_free() == (BUFFERS, BUFFERS)
    region.close()


def test_a_device_that_does_not_copy_is_found_in_practice() -> None:
    region = filled(LAYERS, BLOCKS, BYTES, 1)
    memory = StagedMemory(Impatient(host_planes(region), CHUNK, device=LazyDevice(3)), region.shape, CHUNK)
    with pytest.raises(TransferFailed, match="returns other bytes of KV"):
        memory.practise()
    assert memory.buffers_free() == (BUFFERS, BUFFERS)
    region.close()


def test_a_gpu_without_triton_is_an_error_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "tercet.transport.cuda_copies", raising=False)
    region = filled(1, BLOCKS, BYTES, 1)
    side = Side(Planes(host_planes(region)), range(1), np.array([1]))
    with pytest.raises(TransferFailed, match="pip install triton"):
        CudaDevice(0).copy(side, side, BYTES)
    region.close()
