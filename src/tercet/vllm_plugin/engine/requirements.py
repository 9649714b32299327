"""What an engine must be for its KV to be moved: it says at its start what it is not, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from tercet.vllm_plugin.engine.cache_groups import require_movable_groups
from tercet.vllm_plugin.engine.drafters import require_drafter
from tercet.vllm_plugin.hooks import UnsupportedVLLM

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def require_supported(config: VllmConfig, caches: KVCacheConfig) -> None:
    """Raise :class:`~tercet.vllm_plugin.hooks.UnsupportedVLLM` for the first thing that is in the way."""
    require_supported_config(config)
    require_movable_groups(caches)
    require_kernels_of_states(caches)
    require_states_to_be_kept(config, caches)


def require_supported_config(config: VllmConfig) -> None:
    """As :func:`require_supported`, of what is known before any weights are loaded."""
    require_both_roles(config)
    require_prefill_behind_kv(config)
    require_positions_of_the_prompt(config)
    require_whole_blocks(config)
    require_generation(config)
    require_one_rank(config)
    require_drafter(config)
    require_memory_that_stays(config)


def require_both_roles(config: VllmConfig) -> None:
    """An engine sends and receives. Else vLLM gives away blocks that a step still writes into, over a peer's KV."""
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_role != "kv_both":
        raise UnsupportedVLLM(
            f"--kv-transfer-config: kv_role is {transfer.kv_role!r}, and an engine of Tercet's sends and receives KV: "
            "set it to 'kv_both'"
        )


def require_prefill_behind_kv(config: VllmConfig) -> None:
    """vLLM computes tokens behind KV that is there. Its reference kernels of MLA do not: wrong tokens, and no error."""
    if config.model_config.use_mla and current_platform.is_cpu() and not config.scheduler_config.enable_chunked_prefill:
        raise UnsupportedVLLM(
            "on this CPU vLLM computes no tokens of an MLA model behind KV that is there already (it has turned "
            "chunked prefill and prefix caching off), so none could go on from KV that was sent. Serve it with vLLM"
        )


def require_positions_of_the_prompt(config: VllmConfig) -> None:
    """A token's position follows from the prompt, and not from an encoder's results, which no receiver of KV has."""
    multimodal = config.model_config.multimodal_config
    if multimodal is not None and config.model_config.uses_mrope and (multimodal.video_pruning_rate or 0) > 0:
        raise UnsupportedVLLM(
            "--video-pruning-rate with a model with M-RoPE: positions of tokens then depend on what the encoder makes "
            "of a video, and an engine that goes on from KV of another does not know them; start it without"
        )


def require_whole_blocks(config: VllmConfig) -> None:
    """Prefixes are found by whole blocks: in the middle of one, KV would begin where no block of a lease does."""
    cache = config.cache_config
    unit = getattr(cache, "prefix_match_unit", None)
    if unit not in (None, cache.block_size):
        raise UnsupportedVLLM(
            f"--prefix-match-unit is {unit}, and Tercet's leases begin with whole blocks of {cache.block_size}; "
            "start the engine without it"
        )


def require_kernels_of_states(caches: KVCacheConfig) -> None:
    """There are kernels for the model's states; vLLM would fail at its first prompt, and end with a traceback."""
    kinds = {getattr(group.kv_cache_spec, "mamba_type", None) for group in caches.kv_cache_groups}
    if MambaAttentionBackendEnum.MAMBA1 in kinds and current_platform.is_cpu() and not _scans_states():
        raise UnsupportedVLLM(
            "this vLLM's CPU build has no kernel for Mamba-1 layers (selective_scan_fwd), and fails at any prompt of "
            "this model; serve it on an accelerator"
        )


def _scans_states() -> bool:
    import torch

    return hasattr(torch.ops._C, "selective_scan_fwd")


def require_states_to_be_kept(config: VllmConfig, caches: KVCacheConfig) -> None:
    """No step has to give a state from within it: vLLM's CPU kernels return the last one, and its worker fails."""
    specs = [group.kv_cache_spec for group in caches.kv_cache_groups]
    steps = config.scheduler_config.max_num_batched_tokens
    for spec in specs:
        within = getattr(spec, "num_prefill_checkpoint_blocks", 0) > 0
        if within and current_platform.is_cpu() and steps > spec.block_size:
            raise UnsupportedVLLM(
                "on a CPU vLLM fails at prompts of which one step computes more than a block, if the model has Mamba-2 "
                f"layers; start the engine with --max-num-batched-tokens {spec.block_size}"
            )


def require_memory_that_stays(config: VllmConfig) -> None:
    """KV stays in its memory. vLLM's own allocator takes some away and brings other back, which nobody has mapped."""
    if getattr(config.model_config, "enable_cumem_allocator", False) and not current_platform.is_cpu():
        raise UnsupportedVLLM(
            "--enable-sleep-mode and --enable-cumem-allocator: KV in such memory cannot be mapped by the process that "
            "moves it; start the engine without"
        )


def require_generation(config: VllmConfig) -> None:
    """The engine generates: others have no KV that anybody would go on from."""
    if config.model_config.runner_type != "generate":
        raise UnsupportedVLLM(
            f"this engine's runner is {config.model_config.runner_type!r}, and there is no KV of it to be moved: start "
            "it with `vllm serve`, and name it to `tercet router` by --pooling-server"
        )


def require_one_rank(config: VllmConfig) -> None:
    """One server, one data-parallel rank, and blocks that have all of their tokens."""
    parallel = config.parallel_config
    if parallel.data_parallel_size != 1 and not parallel.data_parallel_external_lb:
        raise UnsupportedVLLM(
            f"--data-parallel-size is {parallel.data_parallel_size}, and one server has several of the ranks: start "
            "each rank as an engine of its own, with its --data-parallel-rank"
        )
    if parallel.decode_context_parallel_size != 1 or parallel.prefill_context_parallel_size != 1:
        raise UnsupportedVLLM(
            "Tercet supports no context parallelism: with --decode-context-parallel-size or "
            "--prefill-context-parallel-size the tokens of a block are spread over ranks"
        )
    if parallel._api_process_count != 1:
        raise UnsupportedVLLM(
            f"--api-server-count is {parallel._api_process_count}, and one API server keeps the leases of an engine: "
            "start it with --api-server-count 1"
        )
