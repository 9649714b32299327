"""KV on a CUDA device read over NIXL: the device's memory registered, and landings on the device. `make test-gpu`.

None of it has run yet: it was written on machines without a device. Within one machine UCX takes what it has between
processes; RDMA is for who has two machines with it.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch

from tercet.transport import KVRegion, RankTransport, TransportSettings
from tercet.transport.backends.tcp import MAX_CHUNK_BYTES
from tercet.transport.staged import StagedMemory
from tercet.transport.torch_blocks import TorchBlocks
from tercet.vllm_plugin.worker.kv_planes import DeviceExport, LayerPlanes
from tests.gpu.test_device_memory import LAYERS, blocks_of, cache, planes_of
from tests.unit.transport.ranks import FINGERPRINT, idle, transfer, transport_to

pytest.importorskip("nixl", reason="scripts/install-transport-extras installs it", exc_type=ImportError)
pytestmark = [pytest.mark.gpu, pytest.mark.verifies("KV blocks", transport="nixl")]


class Worker:
    """A worker's KV, exported and registered as an engine does it with ``transport: nixl``, and a rank over it."""

    def __init__(self, seed: int) -> None:
        self.planes: LayerPlanes = planes_of(cache(seed))
        self.export = DeviceExport(self.planes, "nixl")
        self.region = KVRegion(*self.planes.share_words())
        blocks = TorchBlocks(blocks_of(self.planes), MAX_CHUNK_BYTES, self.region.shape.order, rdma=self.export.rdma)
        memory = StagedMemory(blocks, self.region.shape, MAX_CHUNK_BYTES)
        self.rank = RankTransport(self.region, FINGERPRINT, TransportSettings("nixl"), staged=memory)

    def close(self) -> None:
        self.rank.close()
        self.region.close()


@pytest.fixture
def workers() -> Generator[tuple[Worker, Worker]]:
    found = Worker(1), Worker(2)
    yield found
    for each in found:
        each.close()


def test_a_devices_memory_is_registered_as_such() -> None:
    export = DeviceExport(planes_of(cache(1)), "nixl")
    assert export.rdma is not None
    assert export.rdma.kind == "VRAM"
    assert len(export.rdma.planes) == LAYERS
    assert DeviceExport(planes_of(cache(1)), "tcp").rdma is None


@pytest.mark.parametrize(
    ("sources", "targets"),
    [(list(range(40)), list(range(63, 23, -1))), (list(range(8, 48)), list(range(20, 60)))],
    ids=["scattered", "adjacent"],
)
def test_the_receiver_reads_out_of_the_senders_device(
    workers: tuple[Worker, Worker], sources: list[int], targets: list[int]
) -> None:
    source, target = workers
    kept = sorted(set(range(64)) - set(targets))
    before = [plane[kept].clone() for plane in target.planes.tensors]
    transfer(source.rank, source.region, target.rank, sources, targets)
    assert transport_to(source.rank, target.rank.addresses) == "nixl"
    idle(source.rank, target.rank)
    for layer in range(LAYERS):
        got, wanted = target.planes.tensors[layer][targets], source.planes.tensors[layer][sources]
        assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))
        assert torch.equal(target.planes.tensors[layer][kept].view(torch.int16), before[layer].view(torch.int16))
