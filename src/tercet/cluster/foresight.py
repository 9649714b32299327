"""Early checks for problems that engines would find only after minutes: too little memory, too few cores."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from tercet.cluster.engine_command import EngineSpec, ranks_of, value_of
from tercet.cluster.model_hub import cached_snapshot
from tercet.protocol import BadRequest

GIB = 1 << 30
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
# With these flags the caller sets the KV memory, or the load format.
OWN_MEMORY = ("--kv-cache-memory-bytes", "--num-gpu-blocks-override", "--load-format")
BYTES: Mapping[str, int] = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
# Memory that an engine on CPUs maps before its weights and KV: PyTorch, vLLM, stacks of threads.
LIBRARIES = 5 * GIB // 2
CGROUP = Path("/sys/fs/cgroup")


def require_memory(specs: Sequence[EngineSpec], available: int | None = None) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if the weights and KV of all CPU engines exceed the free memory.

    ``available`` is the free memory in bytes; None means the free memory of this machine and this control group.
    """
    needs = [needed for spec in specs if spec.cores and (needed := _needed(spec)) is not None]
    _require_address_space(needs)
    free = available_memory() if available is None else available
    if not needs or sum(weights + kv for weights, kv in needs) <= free:
        return
    weights, kv = max(needs)
    engines = f"{len(needs)} engines with" if len(needs) > 1 else "an engine with"
    each = " each" if len(needs) > 1 else ""
    raise BadRequest(
        f"--kv-cache-gib: {engines} {weights / GIB:.1f} GiB of weights and {kv / GIB:.0f} GiB of KV{each} need "
        f"{sum(map(sum, needs)) / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free; choose a smaller --kv-cache-gib or "
        "model, or fewer engines",
        "kv-cache-gib",
    )


def _require_address_space(needs: Sequence[tuple[int, int]]) -> None:
    """Check the limit of the address space: a process that exceeds it fails in many ways, some after minutes."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    needed = LIBRARIES + max(map(sum, needs), default=0)
    if needs and allowed != resource.RLIM_INFINITY and allowed < needed:
        raise BadRequest(
            f"ulimit: a process may map {allowed / GIB:.1f} GiB here (ulimit -v), and an engine maps at least "
            f"{needed / GIB:.1f} GiB; run ulimit -v unlimited, or choose a smaller --kv-cache-gib or model",
            "kv-cache-gib",
        )


def shared_cores(specs: Sequence[EngineSpec]) -> str | None:
    """Return a warning if workers must share cores, which makes all of them slow; None otherwise."""
    workers = sum(ranks_of(spec.extra_args) for spec in specs if spec.cores)
    cores = len({core for spec in specs for core in spec.cores})
    if workers <= cores:
        return None
    return f"{workers} workers of engines share {cores} core{'s' if cores > 1 else ''}, so all of them will be slow"


def _needed(spec: EngineSpec) -> tuple[int, int] | None:
    """Return the least bytes of weights and of KV; None if the caller configures memory."""
    if any(value_of(spec.extra_args, flag) is not None for flag in OWN_MEMORY):
        return None
    checkpoint = Path(spec.model) if Path(spec.model).is_dir() else cached_snapshot(spec.model)
    weights = 0 if checkpoint is None else _weights(checkpoint, spec.dtype)
    return weights, spec.kv_cache_gib * GIB * ranks_of(spec.extra_args)


def _weights(checkpoint: Path, dtype: str | None) -> int:
    """Return the bytes of a checkpoint's weights in memory; of several file formats, only one is counted."""
    kinds = ([*checkpoint.glob(kind)] for kind in WEIGHTS)
    stored = next((files for files in kinds if files), list[Path]())
    size = sum(file.stat().st_size for file in stored)
    described: dict[str, Any] = {}
    with suppress(OSError, msgspec.DecodeError):
        described = msgspec.json.decode((checkpoint / "config.json").read_bytes(), type=dict[str, Any])
    had = BYTES.get(str(described.get("dtype") or described.get("torch_dtype")))
    wanted = BYTES.get(str(dtype))
    known = had is not None and wanted is not None and "quantization_config" not in described
    return size * wanted // had if known and wanted and had else size


def available_memory() -> int:
    """Return the bytes of memory that new processes can get on this machine."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError, KeyError):  # no control group, or one without a limit
        limit = int((CGROUP / "memory.max").read_text())
        used = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - int(used["anon"]) - int(used["shmem"]) - int(used["kernel"]))
    return free
