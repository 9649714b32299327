"""What engines compute with on this machine: cores, devices, and the type of numbers where nobody says one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence, Set
from itertools import groupby, islice
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
    left = iter(ordered)
    return [tuple(islice(left, size + (index < larger))) for index in range(engines)]


def as_cpu_list(cores: Sequence[int]) -> str:
    """Cores as Linux and vLLM write them: ``0-2,5``."""
    # In a run of neighbours each core is as far from its place in the order.
    runs = [[core for _, core in run] for _, run in groupby(enumerate(sorted(cores)), lambda at: at[1] - at[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


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
    known = cpu_flags(CPUINFO.read_text()) if cpu and CPUINFO.exists() else frozenset[str]()
    # A CPU that does not tell is believed to have them.
    return "float32" if known and not known & COMPUTE_WITH_BFLOAT16 else "bfloat16"


def cpu_flags(cpuinfo: str) -> Set[str]:
    """What the first processor of a ``/proc/cpuinfo`` can do; empty if it does not say."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
