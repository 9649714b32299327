"""What engines compute with on this machine: cores, devices, and the type of numbers where nobody says one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from tercet.protocol import BadRequest


def split_cores(cores: Sequence[int], engines: int) -> list[tuple[int, ...]]:
    """Split ``cores`` evenly into one contiguous group per engine, larger groups first.

    With fewer cores than engines, engines share them in turn. Raises ``ValueError`` without a core.
    """
    if not cores:
        raise ValueError("there is no core to pin an engine to")
    ordered = sorted(cores)
    if len(ordered) < engines:
        return [(ordered[index % len(ordered)],) for index in range(engines)]
    size, larger = divmod(len(ordered), engines)
    groups: list[tuple[int, ...]] = []
    start = 0
    for index in range(engines):
        end = start + size + (index < larger)
        groups.append(tuple(ordered[start:end]))
        start = end
    return groups


def as_cpu_list(cores: Sequence[int]) -> str:
    """Cores as Linux and vLLM write them: ``0-2,5``."""
    parts: list[str] = []
    first = last = -2
    for core in [*sorted(cores), -1]:
        if core == last + 1:
            last = core
            continue
        if first >= 0:
            parts.append(str(first) if first == last else f"{first}-{last}")
        first = last = core
    return ",".join(parts)


def visible_devices(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """NVIDIA GPUs that engines may use, as ``CUDA_VISIBLE_DEVICES`` names them; none on a CPU machine."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(device for each in named.split(",") if (device := each.strip()) and device != "-1")
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(str(index) for index, _ in enumerate(line for line in listed.splitlines() if line.startswith("GPU ")))


def split_devices(devices: Sequence[str], engines: int, each: int) -> list[tuple[str, ...]]:
    """``each`` devices for every engine, none shared.

    Raises :class:`~tercet.protocol.BadRequest` when there are too few: vLLM fills a GPU's memory with its own cache.
    """
    if engines * each > len(devices):
        raise BadRequest(
            f"--prefill, --decode, --both: {engines} engines with {each} GPUs each need {engines * each}, "
            f"{len(devices)} can be used; start fewer engines, or more GPUs in CUDA_VISIBLE_DEVICES",
            "prefill",
        )
    return [tuple(devices[index * each : (index + 1) * each]) for index in range(engines)]


CPUINFO = Path("/proc/cpuinfo")
# As Linux calls them: x86's, with oneDNN's kernels for AVX-512 that widen on the fly, and ARM's.
COMPUTE_WITH_BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "avx512f", "avx_ne_convert", "bf16"})


def default_dtype(cpu: bool) -> str:
    """``bfloat16``; for engines on a ``cpu`` without instructions for it ``float32``, which is many times as fast."""
    return "float32" if cpu and not _computes_with_bfloat16() else "bfloat16"


def _computes_with_bfloat16() -> bool:
    """Whether this machine's CPU does; believed where it does not tell."""
    found = cpu_flags(CPUINFO.read_text()) if CPUINFO.exists() else frozenset[str]()
    return not found or bool(found & COMPUTE_WITH_BFLOAT16)


def cpu_flags(cpuinfo: str) -> Set[str]:
    """What the first processor of a ``/proc/cpuinfo`` can do; empty if it does not say."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
