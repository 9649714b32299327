"""An engine's load from vLLM's own ``/metrics`` page, by the Gateway API's model server protocol."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

WAITING, RUNNING, USAGE = "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
OLD_USAGE, CONFIG, STARTED = "vllm:gpu_cache_usage_perc", "vllm:cache_config_info", "process_start_time_seconds"
# This finds a few lines of a page of thousands without parsing the others.
_WANTED = re.compile(
    "^({})(?:{{(.*)}})? (\\S+)$".format("|".join((WAITING, RUNNING, USAGE, OLD_USAGE, CONFIG, STARTED))), re.MULTILINE
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class VllmMetrics:
    """One reading. Data parallel ranks behind one page count as one engine: requests are summed, usage is the mean.

    If the page lacks them, ``block_size`` and ``total_blocks`` are 0, and ``started`` is empty.
    """

    waiting: int
    running: int
    kv_usage: float
    model: str
    block_size: int = 0
    total_blocks: int = 0
    started: str = ""


def parsed(page: str) -> VllmMetrics:
    """Parse a page. Raises ``ValueError`` if the page is not vLLM's."""
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    started = ""
    for name, labels, value in _WANTED.findall(page):
        if name == STARTED:
            started = value
        number = float(value)
        if math.isfinite(number):
            found.setdefault(name, []).append((dict(_LABEL.findall(labels)), number))
    usage = found.get(USAGE) or found.get(OLD_USAGE)
    if WAITING not in found or RUNNING not in found or not usage:
        raise ValueError(f"its /metrics page lacks {WAITING}, {RUNNING} or {USAGE}")
    waiting, running = (max(0, round(sum(value for _, value in found[name]))) for name in (WAITING, RUNNING))
    configs = [labels for labels, _ in found.get(CONFIG, ())]
    return VllmMetrics(
        waiting,
        running,
        max(0.0, sum(value for _, value in usage) / len(usage)),
        found[WAITING][0][0].get("model_name", ""),
        max((_whole(labels.get("block_size")) for labels in configs), default=0),
        sum(_whole(labels.get("num_gpu_blocks")) for labels in configs),
        started,
    )


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
