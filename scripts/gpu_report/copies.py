"""The rate of each way in which KV is copied from a device, and of plain copies. One way is measured per process.

A process that has used a device keeps a context on it, and a process whose device has failed cannot use it again. So
the report runs this in separate processes: ``python -m scripts.gpu_report.copies NAME`` prints a number, or a reason.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

COPIED_BYTES = 256 * 1024 * 1024
BLOCK_BYTES = 64 * 1024
ROUNDS = 9
CHILD_SECONDS = 300.0


def measured(name: str) -> float:
    """Measure one of :data:`WAYS` in a separate process. Return bytes per second.

    Raise ``RuntimeError`` with the reason if the process fails.
    """
    command = [sys.executable, "-m", "scripts.gpu_report.copies", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=CHILD_SECONDS)
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        raise RuntimeError(f"the process ended with status {done.returncode}; see above") from None
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def timed(action: Callable[[], object]) -> float:
    """Return the median seconds of ``action`` over the rounds, without the first one."""
    found: list[float] = []
    for _ in range(ROUNDS + 1):
        begun = time.perf_counter()
        action()
        found.append(time.perf_counter() - begun)
    return median(found[1:])


def plain_across() -> float:
    """Copy from the device to itself, in one piece. Return bytes per second."""
    import torch

    source, target = (torch.zeros(COPIED_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return COPIED_BYTES / timed(copy)


def plain_out() -> float:
    """Copy from the device to pinned memory of the host, in one piece. Return bytes per second."""
    import torch

    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return COPIED_BYTES / timed(copy)


def staged() -> float:
    """Copy block by block to the host, through Tercet's buffers. Return bytes per second."""
    memory, scattered = staged_memory("cuda", COPIED_BYTES)
    together = memory.buffer_bytes // BLOCK_BYTES

    def copy() -> None:
        for first in range(0, len(scattered), together):
            with memory.reading(range(1), scattered[first : first + together], 0, BLOCK_BYTES):
                pass

    return COPIED_BYTES / timed(copy)


def staged_memory(device: str, nbytes: int) -> tuple[Any, Any]:
    """Return a rank's memory of one plane, and its blocks in random order."""
    import numpy as np
    import torch

    from tercet.transport import shape_of
    from tercet.transport.backends.tcp import MAX_CHUNK_BYTES
    from tercet.transport.staged import StagedMemory
    from tercet.transport.torch_blocks import TorchBlocks

    blocks = nbytes // BLOCK_BYTES
    plane = torch.zeros(blocks, BLOCK_BYTES, dtype=torch.uint8, device=device)
    memory = StagedMemory(
        TorchBlocks([plane], MAX_CHUNK_BYTES), shape_of([nbytes], blocks, BLOCK_BYTES), MAX_CHUNK_BYTES
    )
    return memory, np.random.default_rng(1).permutation(blocks)


def ipc() -> float:
    """Copy block by block from another process's device memory, as a receiver does. Return bytes per second."""
    import msgspec

    from tercet.transport import DeviceHandles, RegionShape
    from tercet.transport.torch_blocks import PeerBlocks, device_planes

    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    owner = spawn.Process(target=_own, args=(theirs,), daemon=True)
    owner.start()
    try:
        if not ours.poll(CHILD_SECONDS / 2):
            raise RuntimeError("the process that owns the memory did not start in time")
        handles, shape = msgspec.msgpack.decode(ours.recv_bytes(), type=tuple[DeviceHandles, RegionShape])
        planes = PeerBlocks(device_planes(handles, shape))
        memory, scattered = staged_memory("cuda", COPIED_BYTES)
        together = memory.buffer_bytes // BLOCK_BYTES

        parts = [
            (scattered[first : first + together], scattered[::-1][first : first + together])
            for first in range(0, len(scattered), together)
        ]
        chunks = [((range(1), there, 0), (range(1), here, 0), BLOCK_BYTES) for there, here in parts]
        return COPIED_BYTES / timed(lambda: memory.copy_across(planes, chunks, None))
    finally:
        owner.kill()
        owner.join()


def _own(pipe: Connection) -> None:
    """Allocate memory, offer it as a worker does, and keep it until killed."""
    import msgspec
    import torch

    from tercet.vllm_plugin.worker.kv_planes import DeviceExport, LayerPlanes

    blocks = COPIED_BYTES // BLOCK_BYTES
    cache = torch.zeros(blocks, 1, 16, BLOCK_BYTES // 16, dtype=torch.uint8, device="cuda")
    planes = LayerPlanes({"layer": cache}, blocks, [["layer"]])
    _, shape = planes.share_words()
    export = DeviceExport(planes)
    pipe.send_bytes(msgspec.msgpack.encode((export.handles, shape)))
    pipe.recv_bytes()  # blocks until this process is killed


def nixl(device: str = "cuda", nbytes: int = COPIED_BYTES) -> float:
    """Copy from one rank's device memory to another's over NIXL, as a receiver does. Return bytes per second."""
    import numpy as np
    import torch

    from tercet.transport import KVRegion
    from tercet.transport.backends.nixl import NixlDeviceBackend, RegisteredPlanes
    from tercet.transport.backends.reading import Batch, SendingPeer
    from tercet.transport.backends.tcp import MAX_CHUNK_BYTES
    from tercet.transport.peer_messages import BLOCK_NUMBER, ReadDescriptors
    from tercet.transport.staged import StagedMemory
    from tercet.transport.torch_blocks import TorchBlocks

    blocks, together = nbytes // BLOCK_BYTES, MAX_CHUNK_BYTES // BLOCK_BYTES
    planes = [torch.zeros(blocks, BLOCK_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    regions = [KVRegion.create(1, blocks, BLOCK_BYTES) for _ in planes]
    workers = [
        RegisteredPlanes(
            [(each.data_ptr(), each.nbytes)], [(each.data_ptr(), BLOCK_BYTES)],
            "DRAM" if device == "cpu" else "VRAM", each.device.index or 0,
        )
        for each in planes
    ]  # fmt: skip
    memories = [
        StagedMemory(TorchBlocks([plane], MAX_CHUNK_BYTES, rdma=worker.handles), region.shape, MAX_CHUNK_BYTES)
        for plane, worker, region in zip(planes, workers, regions, strict=True)
    ]
    sender, receiver = (NixlDeviceBackend(*each) for each in zip(regions, memories, strict=True))
    reader = receiver.connect(sender.offer(), SendingPeer(regions[0].shape))
    batch = Batch(1, "", memoryview(b""))
    scattered = np.random.default_rng(1).permutation(blocks)
    for number, first in enumerate(range(0, blocks, together)):
        some = scattered[first : first + together]
        named = some.astype(BLOCK_NUMBER).tobytes()
        batch.chunks.append(ReadDescriptors(1, "", number, 0, 1, 0, len(some), named, 0, BLOCK_BYTES))
        batch.blocks.append(some[::-1])
    seconds = timed(lambda: reader.read(batch, lambda step: step()))
    for each in (reader, sender, receiver, *regions):
        each.close()
    return nbytes / seconds


WAYS: dict[str, Callable[[], float]] = {
    "plain_across": plain_across,
    "plain_out": plain_out,
    "ipc": ipc,
    "staged": staged,
    "nixl": nixl,
}


def main(name: str) -> None:
    """Print, as JSON, the bytes per second of one way, or the reason of a failure as text."""
    from tercet.protocol import TercetError

    try:
        print(json.dumps(WAYS[name]()))
    except TercetError as error:
        print(json.dumps(error.message))
    except Exception as error:  # errors of CUDA or PyTorch
        traceback.print_exc()
        print(json.dumps((str(error).strip().splitlines() or [type(error).__name__])[0]))


if __name__ == "__main__":
    main(sys.argv[1])
