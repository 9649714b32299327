"""``nixl`` for KV on devices, with host tensors in the device's role; NIXL and our copies are the real ones."""

from __future__ import annotations

import queue
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from tercet.protocol import TransferFailed
from tercet.transport import (
    BlockOrder,
    HeadSlice,
    KVRegion,
    PlaneRun,
    RankTransport,
    RegionShape,
    SendReport,
    TransportSettings,
)
from tercet.transport.backends import BackendUnavailable, backends_of_device, nixl, tcp
from tercet.transport.backends.nixl import LANDINGS, NixlDeviceBackend, RegisteredPlanes
from tercet.transport.staged import RdmaHandles, StagedMemory
from tercet.transport.torch_blocks import TorchBlocks
from tests.longest_wait import LONGEST_WAIT_S
from tests.unit.transport.ranks import FINGERPRINT, TOKENS, Send, grant, idle, transfer, transport_to

pytestmark = pytest.mark.processes

pytest.importorskip("nixl", reason="scripts/install-transport-extras installs it", exc_type=ImportError)
LAYERS, BLOCKS, BYTES = 3, 24, 24 * 1024
CHUNK = 5 * BYTES
SETTINGS = TransportSettings("nixl")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "READ_SECONDS", 2.0)
    monkeypatch.setattr(nixl, "WAIT_SECONDS", 2.0)
    monkeypatch.setattr(tcp, "MAX_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(tcp, "LEAST_CHUNK_BYTES", BYTES)


class Device:
    """A worker's KV: all layers of a block side by side, or each layer apart. ``rank`` sends and receives it."""

    def __init__(
        self, seed: int, *, together: bool = False, layers: int = LAYERS, order: BlockOrder | None = None
    ) -> None:
        axes = (BLOCKS, layers, BYTES) if together else (layers, BLOCKS, BYTES)
        self.memory = torch.randint(256, axes, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        self.planes = [self.memory[:, layer] if together else self.memory[layer] for layer in range(layers)]
        self.region = KVRegion.create(layers, BLOCKS, BYTES)
        self.registered = RegisteredPlanes(
            [(self.memory.data_ptr(), self.memory.nbytes)],
            [(plane.data_ptr(), plane.stride(0)) for plane in self.planes],
            "DRAM",
        )
        blocks = TorchBlocks(self.planes, CHUNK, order, rdma=self.registered.handles)
        self.staged = StagedMemory(blocks, self.region.shape, CHUNK)

    @contextmanager
    def rank(self, transport: str = "nixl") -> Generator[RankTransport]:
        try:
            found = RankTransport(self.region, FINGERPRINT, TransportSettings(transport), staged=self.staged)
            try:
                yield found
            finally:
                found.close()
        finally:
            self.region.close()

    def content(self) -> list[torch.Tensor]:
        return [plane.clone() for plane in self.planes]


def landings_of(rank: RankTransport) -> nixl.Landings:
    (backend,) = rank._rank.backends
    assert isinstance(backend, NixlDeviceBackend)
    return backend._landings


SCATTERED = [3, 17, 4, 9, 22, 1, 12], [20, 5, 6, 7, 0, 23, 2]
ADJACENT = list(range(4, 16)), list(range(9, 21))


@pytest.mark.parametrize(("sources", "targets"), [SCATTERED, ADJACENT], ids=["scattered", "adjacent"])
@pytest.mark.parametrize("sender_together", [True, False])
def test_blocks_arrive_byte_for_byte_and_nothing_else_changes(
    sender_together: bool, sources: Sequence[int], targets: Sequence[int]
) -> None:
    ours, theirs = Device(1, together=sender_together), Device(2, together=not sender_together)
    wanted = theirs.content()
    for plane, source in zip(wanted, ours.planes, strict=True):
        plane[list(targets)] = source[list(sources)]
    with ours.rank() as sender, theirs.rank() as receiver:
        report = transfer(sender, ours.region, receiver, sources, targets)
        assert report.transport == transport_to(sender, receiver.addresses) == "nixl"
        assert report.chunks > 1
        idle(sender, receiver)
        assert landings_of(receiver).free == LANDINGS
        for plane, expected in zip(theirs.planes, wanted, strict=True):
            assert torch.equal(plane, expected)


def test_each_of_two_gets_its_half_of_every_block_and_layers_have_numbers_of_their_own() -> None:
    ours, theirs = Device(1), Device(2, layers=LAYERS - 1)
    with ours.rank() as sender, theirs.rank() as receiver:
        half = HeadSlice(BYTES // 2, BYTES // 2, 0, 2), HeadSlice(0, BYTES // 2, 1, 2)
        lease = grant(receiver, (4, 6))
        for each in half:
            send = Send(sender, receiver.addresses, lease, each, planes=(PlaneRun(1, 0, LAYERS - 1),))
            send.push(range(LAYERS), (3, 8))
            send.finish(2 * TOKENS)
            assert isinstance(send.wait(), SendReport)
        for layer in range(LAYERS - 1):
            source = ours.planes[layer + 1][[3, 8]]
            assert torch.equal(theirs.planes[layer][[4, 6]], source.roll(BYTES // 2, dims=1))


def test_items_are_put_into_the_receivers_order() -> None:
    heads, tokens, item = 3, TOKENS, BYTES // 3 // TOKENS
    theirs_is, ours_is = BlockOrder("HN", heads, tokens, item), BlockOrder("NH", heads, tokens, item)
    memory = Device(2, order=ours_is)
    with memory.rank() as receiver:
        landing = memory.staged.device.landing(CHUNK)
        assert isinstance(landing.memory, torch.Tensor)
        came = torch.arange(BYTES).to(torch.uint8)
        landing.memory[:BYTES] = came
        here = range(1), torch.tensor([5]).numpy(), 0
        memory.staged.put_landed(landing, here, BYTES, theirs_is)
        assert torch.equal(
            memory.planes[0][5].view(tokens, heads, item), came.view(heads, tokens, item).transpose(0, 1)
        )
        assert receiver.addresses


def test_a_read_that_is_under_way_when_the_lease_ends_writes_to_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence: what comes over RDMA meanwhile is in a landing, and is put nowhere."""
    ours, theirs = Device(1), Device(2)
    reading, go_on = queue.SimpleQueue[None](), queue.SimpleQueue[None]()
    fetch = nixl.NixlDeviceReader._fetch

    def slowly(self: nixl.NixlDeviceReader, *args: Any) -> None:
        fetch(self, *args)
        reading.put(None)
        go_on.get(timeout=LONGEST_WAIT_S)

    with ours.rank() as sender, theirs.rank() as receiver:
        transfer(sender, ours.region, receiver, [0], [0])  # the session is there
        before = theirs.content()
        monkeypatch.setattr(nixl.NixlDeviceReader, "_fetch", slowly)
        lease = grant(receiver, (4,))
        send = Send(sender, receiver.addresses, lease, HeadSlice(0, BYTES))
        send.push(range(LAYERS), (3,))
        send.finish(TOKENS)
        reading.get(timeout=LONGEST_WAIT_S)
        receiver.grants.revoke(lease)
        theirs.planes[0][4] = 7  # somebody else's by now
        before[0][4] = 7
        for _ in range(LAYERS):
            go_on.put(None)
        assert isinstance(send.wait(), TransferFailed)
        idle(sender, receiver)
        for plane, expected in zip(theirs.planes, before, strict=True):
            assert torch.equal(plane, expected)
        assert landings_of(receiver).free == LANDINGS


def test_a_read_that_fails_drops_its_agent_before_its_landing_is_of_use_again() -> None:
    memory = Device(1)
    with memory.rank() as rank:
        (backend,) = rank._rank.backends
        assert isinstance(backend, NixlDeviceBackend)
        wrong = RdmaHandles(
            memory.registered.handles.metadata, tuple((1 << 40, BYTES) for _ in range(LAYERS)), "DRAM", 0
        )
        offer = nixl._DeviceOffer(backend._own_offer().words, wrong)
        reader = backend._reader(offer, memory.region.shape)
        with pytest.raises(TransferFailed, match="cannot read the sender"):
            reader.require_block()
        assert reader._blocks._agent is None
        assert backend._landings.free == LANDINGS
        reader.close()


def test_more_readers_than_landings_wait_for_one() -> None:
    memory = Device(1)
    with memory.rank() as rank, ExitStack() as taken:
        landings = landings_of(rank)
        for _ in range(LANDINGS):
            taken.enter_context(landings.taken())
        with pytest.raises(TransferFailed, match="no landing became free"), landings.taken():
            pass


def test_a_host_and_a_device_take_another_way(caplog: pytest.LogCaptureFixture) -> None:
    ours, host = Device(1), KVRegion.create(LAYERS, BLOCKS, BYTES)
    (backend,) = backends_of_device("nixl", ours.region, ours.staged)
    theirs = nixl.NixlBackend(host)
    sender = nixl.SendingPeer(host.shape)
    with pytest.raises(BackendUnavailable, match="cannot be decoded"):
        backend.connect(theirs.offer(), sender)
    with pytest.raises(BackendUnavailable, match="cannot be decoded"):
        theirs.connect(backend.offer(), sender)
    few = RegionShape((0,), BLOCKS, BYTES, BLOCKS * BYTES, BLOCKS * BYTES)
    with pytest.raises(BackendUnavailable, match="other planes"):
        backend.connect(backend.offer(), nixl.SendingPeer(few))
    for each in (backend, theirs):
        each.close()
    ours.region.close()
    host.close()


def test_ways_where_kv_is_registered() -> None:
    memory = Device(1)
    found = backends_of_device("auto", memory.region, memory.staged)
    assert [each.name for each in found] == ["nixl", "tcp"]
    for each in found:
        each.close()
    memory.region.close()


def test_auto_goes_on_where_nixl_does_not_read_the_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Device(1)

    def unreadable(self: object, *_: object) -> None:
        raise TransferFailed("nixl: the sender's memory cannot be read: no")

    monkeypatch.setattr(nixl.NixlDeviceReader, "_fetch", unreadable)
    found = backends_of_device("auto", memory.region, memory.staged)
    assert [each.name for each in found] == ["tcp"]
    assert "auto continues without nixl" in caplog.text
    with pytest.raises(BackendUnavailable):
        backends_of_device("nixl", memory.region, memory.staged)
    for each in found:
        each.close()
    memory.region.close()


def test_memory_that_cannot_be_registered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_backend(*_: object, **__: object) -> None:
        raise RuntimeError("no UCX backend")

    monkeypatch.setattr(nixl, "NixlAgent", no_backend)
    with pytest.raises(BackendUnavailable, match="cannot register this engine's KV: no UCX backend"):
        RegisteredPlanes([(4096, 4096)], [(4096, 64)], "DRAM")
