"""Stages of a starting engine: one log line at the beginning of each stage, which ``tercet up`` shows.

The stages are those of vLLM's worker interface, in the order in which an engine core has its workers go through them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from tercet.vllm_plugin.start.patching import Method, wrap

logger = logging.getLogger(__name__)
MARK = f"[{__name__}] stage: "
"""Text before a stage's name in a log line."""
OF_WORKERS: Mapping[str, str] = {
    "init_device": "device",
    "load_model": "weights",
    "determine_available_memory": "memory profile",
    "initialize_from_config": "KV cache",
    "compile_or_warm_up_model": "compilation",
}
WITHOUT_COMPILATION = "warm-up"
FIRST_REQUESTS = "first requests"


def begin(stage: str) -> None:
    """Log that this engine has reached ``stage``."""
    logger.info("stage: %s", stage)


def tell_stages_of_workers() -> None:
    """Make the first worker of this process log its stages."""
    from vllm.v1.worker.worker_base import WorkerBase

    def made(make: Method, self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        for method, stage in OF_WORKERS.items():
            if hasattr(type(self), method):
                wrap(type(self), method, functools.partial(_told, stage))

    wrap(WorkerBase, "__init__", made)


def _told(stage: str, original: Method, worker: Any, *args: Any, **kwargs: Any) -> Any:
    if worker.rank == 0:
        eager = worker.model_config.enforce_eager
        begin(WITHOUT_COMPILATION if stage == OF_WORKERS["compile_or_warm_up_model"] and eager else stage)
    return original(worker, *args, **kwargs)
