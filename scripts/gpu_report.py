"""What KV on a GPU costs: ``python -m scripts.gpu_report --model MODEL`` on a machine with one NVIDIA GPU or more.

It starts plain vLLM, then `tercet up` with two engines, and prints a table: TTFT through two engines beside one engine
alone, decode with Tercet beside plain vLLM, bytes per second of staged copies beside a plain copy of the device. With
one GPU both engines share it, which is its fourth row. Nobody has run it on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

from tercet.cluster.devices import list_devices
from tercet.cluster.ports import free_ports

START_SECONDS = 900.0
ROUNDS = 9
COPIED_BYTES = 256 * 1024 * 1024


class Measured(NamedTuple):
    """Medians: seconds, and bytes per second."""

    ttft_alone: float
    ttft_two: float
    step_plain: float
    step_tercet: float
    copy: float
    staged: float
    nixl: float | str
    devices: int


def rows_of(found: Measured) -> list[tuple[str, str, str]]:
    """What was measured, how much it is, and what it ought to be."""
    shared = "one device, shared by both engines" if found.devices == 1 else f"{found.devices} devices"
    nixl = found.nixl if isinstance(found.nixl, str) else f"{found.nixl / found.copy:.2f}"
    return [
        ("where", shared, ""),
        ("TTFT through two engines / one alone", f"{found.ttft_two / found.ttft_alone:.3f}", "1.05 or less"),
        ("decode step with Tercet / plain vLLM", f"{found.step_tercet / found.step_plain:.3f}", "1.02 or less"),
        ("staged copy / plain copy of the device", f"{found.staged / found.copy:.2f}", "as near 1 as can be"),
        ("read over NIXL / plain copy of the device", nixl, "without RDMA, what UCX has between processes"),
        ("plain copy, device to host", f"{found.copy / 1e9:.1f} GB/s", ""),
    ]


def main() -> None:
    """Measure, and print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default="smollm2")
    options.add_argument("--input-len", type=int, default=1500, help="words of each prompt, about")
    given = options.parse_args()
    devices = list_devices()
    if not devices:
        sys.exit("no GPU is to be seen here: nvidia-smi -L, CUDA_VISIBLE_DEVICES")
    copy, staged = copy_speeds()
    nixl = nixl_speed()
    with up(given.model, "--prefill", "0", "--decode", "0", "--both", "1", "--program", "data_parallel") as door:
        name = model_of(door)
        ttft_alone, step_tercet = latencies(door, name, given.input_len)
    with plain_vllm(given.model) as url:
        _, step_plain = latencies(url, model_of(url), given.input_len)
    with up(given.model, "--program-arg", "min_send=1") as door:
        ttft_two, _ = latencies(door, name, given.input_len)
    found = Measured(ttft_alone, ttft_two, step_plain, step_tercet, copy, staged, nixl, len(devices))
    for row in rows_of(found):
        print(f"{row[0]:42} {row[1]:36} {row[2]}")


def copy_speeds() -> tuple[float, float]:
    """Bytes per second from the device to the host: in one plain copy, and block by block through our buffers."""
    import numpy as np
    import torch

    from tercet.transport import shape_of
    from tercet.transport.backends.tcp import MAX_CHUNK_BYTES
    from tercet.transport.memory.staged import StagedMemory
    from tercet.transport.memory.torch_blocks import TorchBlocks

    block_bytes, chunk_blocks = 64 * 1024, MAX_CHUNK_BYTES // (64 * 1024)
    blocks = COPIED_BYTES // block_bytes
    plane = torch.zeros(blocks, block_bytes, dtype=torch.uint8, device="cuda")
    host = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    shape = shape_of([COPIED_BYTES], blocks, block_bytes)
    memory = StagedMemory(TorchBlocks([plane], MAX_CHUNK_BYTES), shape, MAX_CHUNK_BYTES)
    scattered = np.random.default_rng(1).permutation(blocks)

    def plainly() -> None:
        host.copy_(plane.view(-1), non_blocking=True)
        torch.cuda.synchronize()

    def through_buffers() -> None:
        for first in range(0, blocks, chunk_blocks):
            with memory.reading(range(1), scattered[first : first + chunk_blocks], 0, block_bytes):
                pass

    return tuple(COPIED_BYTES / timed(each) for each in (plainly, through_buffers))  # type: ignore[return-value]


def nixl_speed(device: str = "cuda", nbytes: int = COPIED_BYTES) -> float | str:
    """Bytes per second from one rank's memory of a device to another's, as a receiver reads them; or why not."""
    import numpy as np
    import torch

    from tercet.protocol import TransferFailed
    from tercet.transport import KVRegion
    from tercet.transport.backends.nixl_device import NixlDeviceBackend, RegisteredPlanes
    from tercet.transport.backends.reading import Batch, SendingPeer
    from tercet.transport.backends.tcp import MAX_CHUNK_BYTES
    from tercet.transport.memory.staged import StagedMemory
    from tercet.transport.memory.torch_blocks import TorchBlocks
    from tercet.transport.peer_messages import BLOCK_NUMBER, ReadDescriptors

    block_bytes = 64 * 1024
    blocks, together = nbytes // block_bytes, MAX_CHUNK_BYTES // block_bytes
    planes = [torch.zeros(blocks, block_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    regions = [KVRegion.create(1, blocks, block_bytes) for _ in planes]
    try:
        workers = [
            RegisteredPlanes(
                [(each.data_ptr(), each.nbytes)], [(each.data_ptr(), block_bytes)],
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
            batch.chunks.append(ReadDescriptors(1, "", number, 0, 1, 0, len(some), named, 0, block_bytes))
            batch.blocks.append(some[::-1])
        seconds = timed(lambda: reader.read(batch, lambda step: step()))
        for each in (reader, sender, receiver):
            each.close()
    except TransferFailed as error:
        return error.message
    finally:
        for each in regions:
            each.close()
    return nbytes / seconds


def timed(action: Any) -> float:
    """Seconds of one round; the first is not counted."""
    found: list[float] = []
    for _ in range(ROUNDS + 1):
        begun = time.perf_counter()
        action()
        found.append(time.perf_counter() - begun)
    return median(found[1:])


@contextmanager
def up(model: str, *args: str) -> Generator[str]:
    """A fleet; its URL."""
    (port,) = free_ports("127.0.0.1", 1)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tercet.cli", "up", "--model", model, "--port", str(port), *args]
    with running(command, f"{url}/health"):
        yield url


@contextmanager
def plain_vllm(model: str) -> Generator[str]:
    """vLLM without Tercet."""
    from tercet.cluster.model import resolve_model

    (port,) = free_ports("127.0.0.1", 1)
    url = f"http://127.0.0.1:{port}"
    path = resolve_model(model, lambda line: print(line, file=sys.stderr))
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", path, "--port", str(port)]
    with running([*command, "--dtype", "bfloat16"], f"{url}/health"):
        yield url


@contextmanager
def running(command: list[str], health: str) -> Generator[None]:
    """A server, from when it answers on; it is stopped in the end."""
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        try:
            deadline = time.monotonic() + START_SECONDS
            while not answers(health):
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"this does not start: {' '.join(command)}")
                time.sleep(1)
            yield
        finally:
            process.terminate()
            process.wait(120)


def answers(url: str) -> bool:
    """Whether a server is there."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def get(url: str) -> Any:
    """A JSON answer."""
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.load(response)


def model_of(url: str) -> str:
    """The first model that a server has."""
    return get(f"{url}/v1/models")["data"][0]["id"]


def latencies(url: str, model: str, words: int) -> tuple[float, float]:
    """Median TTFT, and median time between two tokens, of streams one after the other, with prompts of their own."""
    first: list[float] = []
    gaps: list[float] = []
    for round_ in range(ROUNDS + 2):
        prompt = f"{secrets.token_hex(8)} " + "the sea was calm and " * (words // 5)
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": 64,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        begun = time.perf_counter()
        with urllib.request.urlopen(request, timeout=300) as response:
            times = [time.perf_counter() for line in response if line.startswith(b"data: {")]
        if round_ >= 2 and len(times) > 2:  # the first two warm up
            first.append(times[0] - begun)
            gaps.append((times[-1] - times[1]) / (len(times) - 2))
    return median(first), median(gaps)


if __name__ == "__main__":
    main()
