"""KV on a CUDA device: copies, handles and events of the real thing. `make test-gpu`; skipped without one."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Generator
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import pytest
import torch

from tercet.transport import DeviceHandles, KVRegion, RankTransport, RegionShape, TransportSettings, shape_of
from tercet.transport.backends.tcp import MAX_CHUNK_BYTES
from tercet.transport.staged import StagedMemory, wait_until
from tercet.transport.torch_blocks import (
    ComputedEvents,
    CudaDevice,
    HostDevice,
    PeerBlocks,
    Planes,
    Side,
    TorchBlocks,
    device_planes,
)
from tercet.vllm_plugin.worker.kv_planes import DeviceExport, LayerPlanes
from tests.unit.transport.ranks import FINGERPRINT, transfer

pytestmark = [pytest.mark.gpu, pytest.mark.verifies("device memory", transport="ipc")]
LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 4, 64, 8, 16, 256
SECONDS = 60


def cache(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator(device="cuda").manual_seed(seed)
    shape = (BLOCKS, HEADS, TOKENS, WIDTH)
    return {
        f"layer.{layer}": torch.randn(shape, generator=random, device="cuda", dtype=torch.bfloat16)
        for layer in range(LAYERS)
    }


def planes_of(layers: dict[str, torch.Tensor]) -> LayerPlanes:
    return LayerPlanes(layers, BLOCKS, [list(layers)])


def blocks_of(planes: LayerPlanes) -> list[torch.Tensor]:
    return [plane.view(torch.uint8).view(BLOCKS, planes.block_bytes) for plane in planes.tensors]


def test_blocks_go_out_and_in_on_streams_of_their_own() -> None:
    source, target = planes_of(cache(1)), planes_of(cache(2))
    shape = shape_of([source.block_bytes * BLOCKS] * LAYERS, BLOCKS, source.block_bytes)
    theirs, ours = (
        StagedMemory(TorchBlocks(blocks_of(each), MAX_CHUNK_BYTES), shape, MAX_CHUNK_BYTES) for each in (source, target)
    )
    sources, targets = np.array([5, 6, 40]), np.array([1, 63, 2])
    room = ours.room()
    with theirs.reading(range(LAYERS), sources, 0, shape.block_bytes) as found:
        owner = found._owners
        assert isinstance(owner, memoryview)
        room.bytes[: len(owner)] = owner
    ours.put(room, range(LAYERS), targets, 0, shape.block_bytes)
    for layer in range(LAYERS):
        got, wanted = target.tensors[layer][targets.tolist()], source.tensors[layer][sources.tolist()]
        assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))


def test_practice_leaves_the_cache_as_it_was() -> None:
    planes = planes_of(cache(1))
    shape = shape_of([planes.block_bytes * BLOCKS] * LAYERS, BLOCKS, planes.block_bytes)
    before = [plane.clone() for plane in planes.tensors]
    StagedMemory(TorchBlocks(blocks_of(planes), MAX_CHUNK_BYTES), shape, MAX_CHUNK_BYTES).practise()
    for plane, was in zip(planes.tensors, before, strict=True):
        assert torch.equal(plane.view(torch.int16), was.view(torch.int16))


def test_copies_do_not_wait_for_the_streams_that_compute() -> None:
    planes = planes_of(cache(1))
    blocks = TorchBlocks(blocks_of(planes), MAX_CHUNK_BYTES)
    into = blocks.buffer(planes.block_bytes)
    # CUDA loads a kernel when it is first used, and may wait for everything then.
    wait_until(blocks.begin_out(range(1), np.array([3]), 0, planes.block_bytes, into), SECONDS)
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(4_000_000_000)  # two seconds of a forward pass
        computed = torch.cuda.Event()
        computed.record()
    wait_until(blocks.begin_out(range(1), np.array([3]), 0, planes.block_bytes, into), SECONDS)
    assert not computed.query(), "the copy waited for it"


@pytest.mark.parametrize(
    ("size", "offset", "stride"), [(64, 0, 64), (24, 8, 72), (6, 2, 50), (5, 1, 37), (8192, 0, 9000)]
)
def test_the_kernel_copies_what_pytorch_copies(size: int, offset: int, stride: int) -> None:
    """Items of each width, aligned and not, within blocks that lie apart; one block is left out."""
    planes = [torch.randint(0, 255, (40, stride), dtype=torch.uint8) for _ in range(6)]
    source, (expected, found) = planes[:3], ([each.clone() for each in planes[3:]] for _ in range(2))
    blocks, places = np.array([5, 0, 39, 7]), np.array([1, -1, 2, 30])
    HostDevice().copy(Side(Planes(source), range(3), blocks, offset), Side(Planes(expected), range(3), places), size)
    there, here = ([each.cuda() for each in some] for some in (source, found))
    device = CudaDevice(0)
    device.copy(Side(Planes(there), range(3), blocks, offset), Side(Planes(here), range(3), places), size)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(here, expected, strict=True))


def test_each_thread_stays_on_its_device() -> None:
    """The last device, where there are several: a thread begins with the first."""
    index = torch.cuda.device_count() - 1
    device, found = CudaDevice(index), list[int]()

    def copy() -> None:
        with device.stream().entered():
            pass
        found.append(torch.cuda.current_device())

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join(SECONDS)
    assert found == [index]


class Other:
    """A process that maps this one's KV, as an agent does."""

    def __init__(self, handles: DeviceHandles, shape: RegionShape) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        encoded = msgspec.msgpack.encode((handles, shape))
        self._process = context.Process(target=_map, args=(theirs, encoded), daemon=True)
        self._process.start()

    def ask(self, what: str, number: int) -> bytes:
        self._pipe.send((what, number))
        assert self._pipe.poll(SECONDS), "the other process does not answer"
        return self._pipe.recv()

    def end(self) -> None:
        self._process.kill()
        self._process.join(SECONDS)


def _map(pipe: Connection, encoded: bytes) -> None:
    handles, shape = msgspec.msgpack.decode(encoded, type=tuple[DeviceHandles, RegionShape])
    planes, events = device_planes(handles, shape), ComputedEvents(handles)
    while True:
        what, number = pipe.recv()
        if what == "wait":
            events.wait(number)
        if what == "across":
            pipe.send(_across(planes, shape, number))
        else:
            pipe.send(planes[LAYERS - 1][number if what == "block" else 0].cpu().numpy().tobytes())


def _across(theirs: list[torch.Tensor], shape: RegionShape, number: int) -> bytes:
    """A block of the last layer, by way of our own cache."""
    ours = [torch.zeros_like(plane, memory_format=torch.contiguous_format) for plane in theirs]
    memory = StagedMemory(TorchBlocks(ours, MAX_CHUNK_BYTES), shape, MAX_CHUNK_BYTES)
    layer, here = range(LAYERS - 1, LAYERS), np.array([5])
    places = (layer, np.array([number]), 0), (layer, here, 0)
    memory.copy_across(PeerBlocks(theirs), [(*places, shape.block_bytes)], None)
    return ours[LAYERS - 1][5].cpu().numpy().tobytes()


@pytest.fixture
def mapped() -> Generator[tuple[LayerPlanes, DeviceExport, Other]]:
    planes = planes_of(cache(1))
    export = DeviceExport(planes)
    fd, shape = planes.share_words()
    KVRegion(fd, shape).close()
    other = Other(export.handles, shape)
    try:
        yield planes, export, other
    finally:
        other.end()


def test_another_process_sees_the_kv(mapped: tuple[LayerPlanes, DeviceExport, Other]) -> None:
    planes, _, other = mapped
    expected = planes.tensors[LAYERS - 1][9].view(torch.uint8).cpu().numpy().tobytes()
    assert other.ask("block", 9) == expected


def test_another_process_waits_for_what_is_computed(mapped: tuple[LayerPlanes, DeviceExport, Other]) -> None:
    planes, export, other = mapped
    torch.cuda._sleep(1_000_000_000)
    planes.tensors[LAYERS - 1][0].fill_(3.0)
    found = other.ask("wait", export.computed())
    assert found == planes.tensors[LAYERS - 1][0].view(torch.uint8).cpu().numpy().tobytes()


def test_a_receiver_copies_out_of_another_processs_memory(mapped: tuple[LayerPlanes, DeviceExport, Other]) -> None:
    """As with `ipc`: this process is the worker, the other one copies its blocks to blocks of its own."""
    planes, _, other = mapped
    expected = planes.tensors[LAYERS - 1][9].view(torch.uint8).cpu().numpy().tobytes()
    assert other.ask("across", 9) == expected


def test_two_ranks_of_one_device_exchange_blocks_while_it_computes() -> None:
    source, target = planes_of(cache(1)), planes_of(cache(2))
    regions = [KVRegion(*each.share_words()) for each in (source, target)]
    ranks = [
        RankTransport(
            region, FINGERPRINT, TransportSettings("tcp"),
            staged=StagedMemory(TorchBlocks(blocks_of(planes), MAX_CHUNK_BYTES), region.shape, MAX_CHUNK_BYTES),
        )
        for region, planes in zip(regions, (source, target), strict=True)
    ]  # fmt: skip
    busy, stop = torch.ones(2048, 2048, device="cuda"), threading.Event()

    def compute() -> None:
        while not stop.is_set():
            busy.matmul(busy)
            torch.cuda.synchronize()

    computing = threading.Thread(target=compute)
    computing.start()
    try:
        sources, targets = list(range(40)), list(range(63, 23, -1))
        transfer(ranks[0], regions[0], ranks[1], sources, targets)
        for layer in range(LAYERS):
            got, wanted = target.tensors[layer][targets], source.tensors[layer][sources]
            assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))
    finally:
        stop.set()
        computing.join()
        for rank, region in zip(ranks, regions, strict=True):
            rank.close()
            region.close()
