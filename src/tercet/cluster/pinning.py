"""Which cores each engine computes on."""

from __future__ import annotations

from collections.abc import Sequence


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
