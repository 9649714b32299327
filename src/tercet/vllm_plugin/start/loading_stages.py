"""Stages of a starting engine: one log line at the beginning of each stage, which ``tercet up`` shows.

The stages are those of vLLM's worker interface, in the order in which an engine core has its workers go through them.
Each worker of an engine with Tercet's connector is of a subclass that logs them: vLLM gets its name as ``worker_cls``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tercet.vllm_plugin.start.patching import handed_in, original_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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


def log_stages_of_workers(config: VllmConfig) -> None:
    """Make the first worker of an engine with this ``config`` log its stages."""
    parallel = config.parallel_config
    if not parallel.worker_cls.startswith(__name__):
        parallel.worker_cls = handed_in(__name__, parallel.worker_cls)


@functools.cache
def __getattr__(name: str) -> type:
    worker = original_of(name)
    methods = {
        method: _logged(getattr(worker, method), stage)
        for method, stage in OF_WORKERS.items()
        if hasattr(worker, method)
    }
    return type(worker.__name__, (worker,), methods)


def _logged(original: Callable[..., Any], stage: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def logged(worker: Any, *args: Any, **kwargs: Any) -> Any:
        if worker.rank == 0:
            eager = worker.model_config.enforce_eager
            begin(WITHOUT_COMPILATION if stage == OF_WORKERS["compile_or_warm_up_model"] and eager else stage)
        return original(worker, *args, **kwargs)

    return logged
