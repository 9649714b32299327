"""A worker's KV on a device, opened by its agent and by other engines' agents, under CUDA's rules."""

from __future__ import annotations

import os
import threading

import msgspec
import pytest
import torch

from tercet.protocol import TransferFailed
from tercet.transport import DeviceHandles, LayersDone, Push, RegionShape
from tercet.transport.torch_blocks import ComputedEvents, CudaDevice, CudaStream, device_planes, open_device_planes
from tercet.vllm_plugin.core.connector_messages import StepMetadata
from tercet.vllm_plugin.worker.kv_planes import EVENTS, DeviceExport, LayerPlanes, StepLayers
from tercet.vllm_plugin.worker.worker_side import WorkerSide
from tests.unit.vllm_plugin.fake_cuda import FakeCuda, FakeEvent, install

BLOCKS, LAYERS = 6, 3


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


def planes_on(device: int, seed: int = 1) -> LayerPlanes:
    """Layers of one allocation, as vLLM makes it, on a worker's device of that number."""
    random = torch.Generator().manual_seed(seed)
    memory = torch.randint(0, 256, (LAYERS, BLOCKS, 2, 8, 16), dtype=torch.uint8, generator=random)
    layers = {f"layer.{index}": memory[index] for index in range(LAYERS)}
    planes = LayerPlanes(layers, BLOCKS, [list(layers)])
    planes.device = torch.device("cuda", device)
    return planes


def exported(cuda: FakeCuda, planes: LayerPlanes) -> DeviceExport:
    torch.cuda.set_device(planes.device)
    export = DeviceExport(planes)
    # What goes through a message, and nothing else.
    export.handles = msgspec.msgpack.decode(msgspec.msgpack.encode(export.handles), type=DeviceHandles)
    return export


def shape_of(planes: LayerPlanes) -> RegionShape:
    fd, shape = planes.share_words()
    os.close(fd)
    return shape


def test_an_agent_maps_its_workers_kv_and_touches_no_other_device(cuda: FakeCuda) -> None:
    """The second rank of an engine: by the number that the device has for both."""
    with cuda.process("worker", 4, 5):
        planes = planes_on(1)
        export = exported(cuda, planes)
    with cuda.process("agent", 4, 5):
        mapped = device_planes(export.handles, shape_of(planes))
        for plane, theirs in zip(planes.tensors, mapped, strict=True):
            assert torch.equal(plane.reshape(BLOCKS, -1), theirs)
        events = ComputedEvents(export.handles)
    assert len(export.handles.storages) == 1
    assert cuda.contexts == {("worker", 5), ("agent", 5)}
    assert cuda.synchronized == ["worker"], "vLLM's zeroing of the cache was not waited for"
    with cuda.process("worker", 4, 5):
        number = export.computed()
    over: list[bool] = []

    def wait() -> None:
        with cuda.process("agent", 4, 5):
            events.wait(number)
        over.append(True)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.1)
    assert not over, "the layer is not computed yet"
    export._events[number].over = True  # type: ignore[attr-defined]
    waiting.join(60)
    assert over
    assert cuda.contexts == {("worker", 5), ("agent", 5)}, "another thread has gone to device 0"


def test_copies_of_any_thread_stay_on_the_ranks_device(cuda: FakeCuda) -> None:
    """A thread begins with device 0, and leaving a stream goes back to where the thread was."""

    def copy() -> None:
        with cuda.process("agent", 4, 5):
            with stream.entered():
                pass
            stream.mark()()

    with cuda.process("agent", 4, 5):
        stream = CudaDevice(1).stream()
        assert isinstance(stream, CudaStream)
    thread = threading.Thread(target=copy)
    thread.start()
    thread.join(60)
    assert cuda.contexts == {("agent", 5)}


@pytest.mark.parametrize(("sees", "index"), [((7,), 0), ((2, 5, 7), 2), ((7, 5), 0)])
def test_another_engine_maps_it_for_its_own_device_whatever_the_senders_number(
    cuda: FakeCuda, sees: tuple[int, ...], index: int
) -> None:
    with cuda.process("worker", 4, 5):
        planes = planes_on(1)
        offer = msgspec.msgpack.encode(exported(cuda, planes).handles)
    with cuda.process("their agent", *sees):
        found = open_device_planes(offer, shape_of(planes), CudaDevice(index))
        assert torch.equal(found[2], planes.tensors[2].reshape(BLOCKS, -1))
    assert ("their agent", 7) in cuda.contexts
    assert len([each for each in cuda.contexts if each[0] == "their agent"]) == 1


def test_a_process_does_not_open_what_is_its_own(cuda: FakeCuda) -> None:
    with cuda.process("worker", 0):
        planes = planes_on(0)
        export = exported(cuda, planes)
        with pytest.raises(TransferFailed, match="cannot be mapped"):
            device_planes(export.handles, shape_of(planes))


@pytest.mark.parametrize(
    "places", [((0, 0, 1 << 40),) * LAYERS, ((9, 0, 256),) * LAYERS, ((0, -1, 256),) * LAYERS, ((0, 0, 256),)]
)
def test_an_offer_that_names_other_memory_is_refused(cuda: FakeCuda, places: tuple[tuple[int, int, int], ...]) -> None:
    with cuda.process("worker", 0):
        planes = planes_on(0)
        handles = exported(cuda, planes).handles
    offer = msgspec.msgpack.encode(msgspec.structs.replace(handles, planes=places))
    with cuda.process("agent", 0), pytest.raises(TransferFailed, match=r"cannot be mapped|other planes"):
        open_device_planes(offer, shape_of(planes), CudaDevice(0))


class Notes:
    """An agent that only listens."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def send(self, note: object) -> None:
        self.heard.append(note)


def worker_on(cuda: FakeCuda) -> tuple[WorkerSide, DeviceExport, Notes]:
    planes, notes = planes_on(0), Notes()
    found = WorkerSide.__new__(WorkerSide)
    export = exported(cuda, planes)
    vars(found).update(
        _rank=0, _step=StepMetadata(), _device=export, _layers=0, _planes_of=planes.planes_of,
        _layers_of_step=StepLayers(LAYERS), _started=notes,
        _layout=type("Layout", (), {"block_bytes": 1 << 20})(),
    )  # fmt: skip
    return found, export, notes


def test_nothing_is_recorded_where_a_graph_is_captured(cuda: FakeCuda) -> None:
    """vLLM captures, warms up and profiles without metadata; also a hook that runs all the same records nothing."""
    with cuda.process("worker", 0):
        worker, export, notes = worker_on(cuda)
        cuda.capturing = True
        for layer in range(LAYERS):
            worker.save_layer(f"layer.{layer}")
        worker.end_step()
        assert not any(isinstance(event, FakeEvent) and event.recorded for event in export._events)
        assert notes.heard == []


def test_each_note_of_a_step_has_an_event_behind_its_layers_and_a_full_graph_has_one(cuda: FakeCuda) -> None:
    with cuda.process("worker", 0):
        worker, export, notes = worker_on(cuda)
        pushes = [Push("s", 0, (1,))]
        for piecewise in (True, False):
            worker.begin_step(StepMetadata(pushes=pushes))
            for layer in range(LAYERS if piecewise else 0):
                worker.save_layer(f"layer.{layer}")
            worker.end_step()
        told = [(note.planes, note.computed) for note in notes.heard if isinstance(note, LayersDone)]
        assert told == [((0,), 0), ((1,), 1), ((2,), 2), ((0, 1, 2), 3)]
        assert [export.computed() for _ in range(EVENTS)][-1] == 3, "the ring"
        assert cuda.synchronized == ["worker"], "a step waits for nothing"
