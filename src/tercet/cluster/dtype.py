"""The type that engines compute in where nobody says one."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

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
