"""KV that is reached through buffers, with the host's pages in the device's role: the same code that a GPU runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.protocol import BadRequest, TransferFailed
from tercet.transport import BlockOrder, HeadSlice, KVRegion, RankTransport, SendReport, TransportSettings, staged
from tercet.transport.backends import backends_for, backends_of_device, tcp
from tercet.transport.backends.reading import Batch
from tercet.transport.region import Numbers, PlaneRun, RegionShape
from tercet.transport.staged import BUFFERS, StagedMemory
from tercet.transport.torch_blocks import CopyDevice, TorchBlocks, host_planes
from tests.longest_wait import LONGEST_WAIT_S
from tests.unit.transport.ranks import (
    FINGERPRINT,
    TOKENS,
    Held,
    Send,
    content,
    expected_after,
    filled,
    grant,
    idle,
    rank,
    settle,
    transfer,
    transport_to,
    whole,
)

LAYERS, BLOCKS, BYTES = 3, 32, 96 * 1024
# Three blocks, so that a send takes many chunks.
CHUNK = 3 * BYTES
TCP = TransportSettings("tcp")


@pytest.fixture(scope="module", autouse=True)
def _small_chunks() -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tcp, "MAX_CHUNK_BYTES", CHUNK)
        patch.setattr(tcp, "LEAST_CHUNK_BYTES", BYTES)
        yield


class SlowBlocks(TorchBlocks):
    """A device that finishes a copy when it is told to; ``begun`` counts copies in and out."""

    def __init__(self, region: KVRegion) -> None:
        super().__init__(host_planes(region), CHUNK)
        self.go_on = threading.Event()
        self.begun = [0, 0]

    def begin_out(
        self, layers: range, blocks: Numbers, offset: int, size: int, into: memoryview
    ) -> Callable[[], bool]:  # fmt: skip
        super().begin_out(layers, blocks, offset, size, into)
        self.begun[0] += 1
        return self.go_on.is_set

    def begin_in(
        self, layers: range, blocks: Numbers, offset: int, size: int, source: memoryview, order: BlockOrder | None
    ) -> Callable[[], bool]:
        super().begin_in(layers, blocks, offset, size, source, order)
        self.begun[1] += 1
        return self.go_on.is_set


def memory_of(region: KVRegion, device: TorchBlocks | None = None) -> StagedMemory:
    return StagedMemory(device or TorchBlocks(host_planes(region), CHUNK), region.shape, CHUNK)


@contextmanager
def staged_rank(
    region: KVRegion, settings: TransportSettings = TCP, device: TorchBlocks | None = None
) -> Generator[tuple[RankTransport, StagedMemory]]:
    memory = memory_of(region, device)
    transport = RankTransport(region, FINGERPRINT, settings, staged=memory)
    try:
        yield transport, memory
    finally:
        transport.close()
        region.close()


def blocks_of(count: int, seed: int) -> Sequence[int]:
    return np.random.default_rng(seed).permutation(BLOCKS)[:count].tolist()


@pytest.mark.parametrize("sender_staged", [True, False])
@pytest.mark.parametrize("receiver_staged", [True, False])
def test_any_two_kinds_of_memory_exchange_blocks_byte_for_byte(sender_staged: bool, receiver_staged: bool) -> None:
    source, target = filled(LAYERS, BLOCKS, BYTES, 1), filled(LAYERS, BLOCKS, BYTES, 2)
    before = content(target)
    sources, targets = blocks_of(20, 3), blocks_of(20, 4)
    with (
        staged_rank(source) if sender_staged else rank(source, TCP) as first,
        staged_rank(target) if receiver_staged else rank(target, TCP) as second,
    ):
        sender = first[0] if isinstance(first, tuple) else first
        receiver = second[0] if isinstance(second, tuple) else second
        report = transfer(sender, source, receiver, sources, targets)
        assert report.bytes == 20 * LAYERS * BYTES
        assert transport_to(sender, receiver.addresses) == "tcp"
        idle(sender, receiver)
        for each in (first, second):
            if isinstance(each, tuple):
                assert each[1].buffers_free() == (BUFFERS, BUFFERS)
        assert content(target) == expected_after(before, source, sources, targets)


def test_more_goes_through_than_the_buffers_hold_in_both_directions_at_once() -> None:
    first, second = filled(LAYERS, BLOCKS, BYTES, 1), filled(LAYERS, BLOCKS, BYTES, 2)
    half, other = list(range(16)), list(range(16, 32))
    before = content(first), content(second)
    with staged_rank(first) as (here, _), staged_rank(second) as (there, _):
        threads = [
            threading.Thread(target=transfer, args=(here, first, there, half, other)),
            threading.Thread(target=transfer, args=(there, second, here, half, other)),
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
        assert content(second) == expected_after(before[1], first, half, other)
        assert content(first) == expected_after(before[0], second, half, other)


def test_a_lease_is_not_over_while_the_device_writes_its_blocks() -> None:
    source, target = filled(LAYERS, BLOCKS, BYTES, 1), filled(LAYERS, BLOCKS, BYTES, 2)
    device = SlowBlocks(target)
    with rank(source, TCP) as sender, staged_rank(target, device=device) as (receiver, memory):
        lease = grant(receiver, (0, 1))
        send = Send(sender, receiver.addresses, lease, whole(source))
        send.push(range(LAYERS), (2, 3))
        settle(lambda: device.begun[1])
        revoked = threading.Thread(target=receiver.grants.revoke, args=(lease,))
        revoked.start()
        revoked.join(0.2)
        assert revoked.is_alive(), "the device has not said that it is done with the blocks"
        device.go_on.set()
        revoked.join(60)
        assert not revoked.is_alive()
        after = content(target)
        begun = device.begun[1]
        send.finish(32)
        assert isinstance(send.wait(), TransferFailed)
        idle(sender, receiver)
        assert (content(target), device.begun[1]) == (after, begun), "nothing is written once the lease is over"
        settle(lambda: memory.buffers_free() == (BUFFERS, BUFFERS))


def test_a_send_that_is_cancelled_waits_for_the_device_and_gives_its_buffers_back() -> None:
    source, target = filled(LAYERS, BLOCKS, BYTES, 1), filled(LAYERS, BLOCKS, BYTES, 2)
    before, device = content(target), SlowBlocks(source)
    with staged_rank(source, device=device) as (sender, memory), rank(target, TCP) as receiver:
        lease = grant(receiver, (0, 1))
        send = Send(sender, receiver.addresses, lease, whole(source))
        send.push(range(LAYERS), (2, 3))
        settle(lambda: device.begun[0])
        cancelled = threading.Thread(target=send.cancel)
        cancelled.start()
        cancelled.join(0.2)
        assert cancelled.is_alive(), "the device still reads the blocks"
        device.go_on.set()
        cancelled.join(60)
        assert not cancelled.is_alive()
        receiver.grants.revoke(lease)
        settle(lambda: memory.buffers_free() == (BUFFERS, BUFFERS))
        assert content(target) == before


def test_a_device_that_never_ends_a_copy_fails_the_send_and_keeps_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged.wait_until, "__defaults__", (0.05,))
    region = filled(LAYERS, BLOCKS, BYTES, 1)
    device = SlowBlocks(region)
    memory = memory_of(region, device)
    with pytest.raises(TransferFailed, match="has not copied"), memory.reading(range(1), np.array([1]), 0, BYTES):
        pytest.fail("nothing was copied")
    assert memory.buffers_free()[0] == BUFFERS - 1
    device.go_on.set()
    assert memory.buffers_free()[0] == BUFFERS
    region.close()


def test_nothing_is_left_of_ranks_that_were_closed() -> None:
    source, target = filled(LAYERS, BLOCKS, BYTES, 1), filled(LAYERS, BLOCKS, BYTES, 2)
    held = Held(source, target)
    with staged_rank(source) as (sender, _), staged_rank(target) as (receiver, _):
        assert isinstance(transfer(sender, source, receiver, (1, 2), (3, 4)), SendReport)
    held.require_back()


@settings(max_examples=settings().max_examples * 3 // 5, deadline=None)
@given(data=st.data())
def test_parts_of_blocks_go_where_they_belong(data: st.DataObject) -> None:
    """Every head's part, every choice of layers and blocks, with some that go nowhere."""
    parts = data.draw(st.sampled_from((1, 2, 4)))
    size = data.draw(st.sampled_from((4, 6, 16, 24)))
    source, target = filled(LAYERS, 8, parts * size, 1), filled(LAYERS, 8, parts * size, 2)
    theirs, ours = memory_of(source), memory_of(target)
    layers = data.draw(st.sampled_from([range(a, b) for a in range(LAYERS) for b in range(a + 1, LAYERS + 1)]))
    sources = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=5, unique=True))
    targets = data.draw(st.permutations(range(8)))[: len(sources)]
    nowhere = data.draw(st.lists(st.booleans(), min_size=len(sources), max_size=len(sources)))
    part = data.draw(st.integers(0, parts - 1))
    expected = [bytearray(each) for each in content(target)]
    blocks = np.array([-1 if skip else here for here, skip in zip(targets, nowhere, strict=True)], dtype=np.int64)
    for layer in layers:
        for there, here in zip(sources, blocks.tolist(), strict=True):
            if here >= 0:
                at = here * parts * size + part * size
                expected[layer][at : at + size] = source.blocks(layer, there)[part * size :][:size]
    room = ours.room()
    with theirs.reading(layers, np.array(sources), part * size, size) as found:
        nbytes = found.left
        room.bytes[:nbytes] = bytes_of(theirs, layers, sources, part * size, size)
    assert ours.put(room, layers, blocks, part * size, size) == nbytes
    room.give_back()
    assert content(target) == [bytes(each) for each in expected]
    for each in (source, target):
        each.close()


def bytes_of(memory: StagedMemory, layers: range, blocks: Sequence[int], offset: int, size: int) -> bytes:
    """What a buffer that is filled anew holds."""
    with memory.reading(layers, np.array(blocks), offset, size) as found:
        owner = found._owners
        assert isinstance(owner, memoryview)
        return bytes(owner)


@pytest.mark.parametrize(
    ("layers", "blocks", "offset", "size"),
    [
        (range(4), [0], 0, BYTES),
        (range(1), [BLOCKS], 0, BYTES),
        (range(1), [-1], 0, BYTES),
        (range(1), [0], 1, BYTES),
        (range(1), [0, 1, 2, 3], 0, BYTES),
    ],
)
def test_what_is_not_in_the_cache_or_in_a_buffer_is_refused(
    layers: range, blocks: list[int], offset: int, size: int
) -> None:
    region = filled(LAYERS, BLOCKS, BYTES, 1)
    memory = memory_of(region)
    with pytest.raises(BadRequest), memory.reading(layers, np.array(blocks), offset, size):
        pytest.fail("it was read")
    assert memory.buffers_free() == (BUFFERS, BUFFERS)
    region.close()


def test_a_chunk_that_no_buffer_holds_is_refused() -> None:
    source, target = filled(1, 8, BYTES, 1), filled(1, 8, BYTES, 2)
    small = StagedMemory(TorchBlocks(host_planes(target), 1), target.shape, 1)
    with rank(source, TransportSettings("tcp", streams=1)) as sender:
        receiver = RankTransport(target, FINGERPRINT, TCP, staged=small)
        try:
            lease = grant(receiver, (0, 1, 4))
            send = Send(sender, receiver.addresses, lease, HeadSlice(0, BYTES))
            send.push(range(1), (2, 3, 5))
            send.finish(48)
            outcome = send.wait()
            assert isinstance(outcome, TransferFailed)
            assert "does not fit into this rank's buffers" in outcome.message
        finally:
            receiver.close()
            target.close()


@pytest.mark.parametrize(
    ("name", "offer", "found"),
    [("auto", b"", ["tcp"]), ("auto", b"it", ["ipc", "tcp"]), ("tcp", b"it", ["tcp"]), ("ipc", b"it", ["ipc"])],
)
def test_ways_to_kv_on_a_device(name: str, offer: bytes, found: list[str]) -> None:
    region = filled(1, 2, BYTES, 1)
    memory = memory_of(region, TorchBlocks(host_planes(region), CHUNK, offer=offer))
    backends = backends_of_device(name, region, memory)
    assert [backend.name for backend in backends] == found
    for backend in backends:
        backend.close()
    region.close()


@pytest.mark.parametrize(
    ("name", "says"),
    [("host", "cannot read"), ("nixl", "cannot read"), ("ipc", "cannot read"), ("pigeon", "is unknown")],
)
def test_a_transport_that_does_not_reach_the_device_is_refused(name: str, says: str) -> None:
    region = filled(1, 2, BYTES, 1)
    with pytest.raises(BadRequest, match=says):
        backends_of_device(name, region, memory_of(region))
    region.close()


def test_ipc_is_for_devices() -> None:
    region = filled(1, 2, BYTES, 1)
    with pytest.raises(BadRequest, match="in host memory"):
        backends_for("ipc", region)
    region.close()


def test_a_connection_that_comes_late_waits_for_no_room() -> None:
    region = filled(1, 4, BYTES, 1)
    memory = memory_of(region)
    taken = [memory.room() for _ in range(BUFFERS)]
    work = tcp._Work(Batch(1, "", memoryview(b""), memory=memory), lambda step: step())
    assert work._take(patient=True) is None
    for each in taken:
        each.give_back()
    assert memory.buffers_free() == (BUFFERS, BUFFERS)
    region.close()


# ---- devices of one machine ------------------------------------------------------------------------------------------


class SharedBlocks(TorchBlocks):
    """Blocks that others may map: here those of ``theirs``, in this process."""

    def __init__(self, region: KVRegion, theirs: KVRegion | None = None) -> None:
        def opened(offer: bytes, _: RegionShape, __: CopyDevice) -> Sequence[torch.Tensor]:
            if theirs is None:
                raise TransferFailed("ipc: no device of the sender's can be seen from here")
            return host_planes(theirs)

        super().__init__(host_planes(region), CHUNK, offer=b"it", open_planes=opened)


def test_a_receiver_copies_out_of_a_device_that_it_has_mapped() -> None:
    source, target = filled(LAYERS, BLOCKS, BYTES, 1), filled(LAYERS, BLOCKS, BYTES, 2)
    before, sources, targets = content(target), blocks_of(20, 3), blocks_of(20, 4)
    auto = TransportSettings()
    with (
        staged_rank(source, auto, SharedBlocks(source)) as (sender, _),
        staged_rank(target, auto, SharedBlocks(target, source)) as (receiver, memory),
    ):
        assert transfer(sender, source, receiver, sources, targets).transport == "ipc"
        assert memory.buffers_free() == (BUFFERS, BUFFERS)
        assert content(target) == expected_after(before, source, sources, targets)


def test_layers_of_mapped_devices_have_numbers_of_their_own() -> None:
    """Pipeline stages split otherwise: here the receiver's first layers are the sender's last ones."""
    source, target = filled(LAYERS, BLOCKS, BYTES, 1), filled(LAYERS - 1, BLOCKS, BYTES, 2)
    auto = TransportSettings()
    with (
        staged_rank(source, auto, SharedBlocks(source)) as (sender, _),
        staged_rank(target, auto, SharedBlocks(target, source)) as (receiver, _),
    ):
        lease = grant(receiver, (4,))
        send = Send(sender, receiver.addresses, lease, whole(source), planes=(PlaneRun(1, 0, LAYERS - 1),))
        send.push(range(LAYERS), (3,))
        send.finish(TOKENS)
        outcome = send.wait()
        assert isinstance(outcome, SendReport)
        assert outcome.transport == "ipc"
        for layer in range(LAYERS - 1):
            assert bytes(target.blocks(layer, 4)) == bytes(source.blocks(layer + 1, 3))


def test_a_device_that_cannot_be_mapped_is_reached_through_buffers() -> None:
    source, target = filled(LAYERS, BLOCKS, BYTES, 1), filled(LAYERS, BLOCKS, BYTES, 2)
    auto = TransportSettings()
    with (
        staged_rank(source, auto, SharedBlocks(source)) as (sender, _),
        staged_rank(target, auto, SharedBlocks(target)) as (receiver, _),
    ):
        assert transfer(sender, source, receiver, (1, 2), (3, 4)).transport == "tcp"


def test_a_mapped_device_whose_send_is_over_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = filled(LAYERS, BLOCKS, BYTES, 1), filled(LAYERS, BLOCKS, BYTES, 2)
    auto, device, may_copy = TransportSettings(), SharedBlocks(target, source), threading.Event()
    begin_across = device.begin_across

    def begin_later(*args: Any) -> Callable[[], bool]:
        assert may_copy.wait(LONGEST_WAIT_S)
        return begin_across(*args)

    monkeypatch.setattr(device, "begin_across", begin_later)
    with (
        staged_rank(source, auto, SharedBlocks(source)) as (sender, _),
        staged_rank(target, auto, device) as (receiver, _),
    ):
        may_copy.set()
        transfer(sender, source, receiver, (1,), (3,))  # the session is there
        may_copy.clear()
        lease = grant(receiver, (0, 1))
        send = Send(sender, receiver.addresses, lease, whole(source))
        send.push(range(LAYERS), (2, 3))
        send.cancel()
        may_copy.set()  # a fast copy would be over, and valid, before the send is
        assert receiver.grants.revoke(lease) in (0, None)


@pytest.mark.parametrize("across", [True, False])
def test_an_engine_whose_device_hangs_in_a_copy_into_blocks_ends(across: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(staged, "end_process", lambda: ended.append(True))
    monkeypatch.setattr(staged.wait_until, "__defaults__", (0.05,))
    source, target = filled(1, 4, BYTES, 1), filled(1, 4, BYTES, 2)
    device = SlowBlocks(target)
    monkeypatch.setattr(device, "begin_across", lambda *_: lambda: False)
    memory, blocks = memory_of(target, device), np.array([1])
    if across:
        memory.copy_across(object(), [((range(1), blocks, 0), (range(1), blocks, 0), BYTES)], None)
    else:
        memory.put(memory.room(), range(1), blocks, 0, BYTES)
    assert ended
    source.close()
    target.close()
