"""Checks before an engine loads its weights: first of its flags, then of its config, each with a remedy.

The same checks run again where they protect something: in the connector, and where the verbs are attached.
"""

from __future__ import annotations

import traceback
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from tercet.protocol import BadRequest, TercetError
from tercet.vllm_plugin.core.cache_groups import require_movable_groups
from tercet.vllm_plugin.hooks import Method, UnsupportedVLLM, require_hooks, wrap
from tercet.vllm_plugin.start.plugin_settings import parse_settings
from tercet.vllm_plugin.start.process_output import AFTER_DASHES, log_stages_of_workers, refusing_in_a_sentence
from tercet.vllm_plugin.start.siblings_config import is_tercets, require_no_sibling, settings_of, with_siblings
from tercet.vllm_plugin.worker.kv_layout import require_drafter
from tercet.wire.serving.server_access import callers_of

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


PLUGIN = "tercet"
# Most characters of vLLM's sentence, and of a refused value in it.
LONGEST_SENTENCE, LONGEST_VALUE = 400, 60


def check_before_loading() -> None:
    """Make vLLM's servers check Tercet's requirements before they load anything.

    A failed check ends the server with one sentence. Relies on ``EngineArgs.from_cli_args`` getting all flags of a
    server, and on ``create_engine_config`` being called before any process of the engine is started.
    """
    from vllm.engine.arg_utils import EngineArgs

    wrap(EngineArgs, "create_engine_config", _config_checked)
    wrap(EngineArgs, "from_cli_args", _flags_checked)


def _flags_checked(make: Method, cls: type, args: Namespace) -> Any:
    with refusing_in_a_sentence():
        require_flags(args)
    return make(cls, args)


def _config_checked(create: Method, args: Any, *more: Any, **named: Any) -> VllmConfig:
    transfer: KVTransferConfig | None = getattr(args, "kv_transfer_config", None)
    with refusing_in_a_sentence():
        if transfer is not None:
            args.kv_transfer_config = with_siblings(transfer)
        try:
            config = create(args, *more, **named)
        except (ValueError, OSError) as error:
            if not is_tercets(transfer):
                raise
            traceback.print_exception(error)  # where in vLLM it was found, for the log
            raise refusal_of_vllm(error) from error
        require_no_sibling(config.kv_transfer_config)
        if is_tercets(config.kv_transfer_config):
            require_supported_config(config)
            log_stages_of_workers(config)
    return config


def refusal_of_vllm(error: ValueError | OSError) -> TercetError:
    """Return what vLLM's configuration says about a flag's value, or about files of the model, as one sentence."""
    if isinstance(error, OSError):
        return TercetError(f"vLLM cannot read the model: {_first_paragraph(str(error))}", "model")
    if not isinstance(error, ValidationError):
        return BadRequest(f"{AFTER_DASHES}: {_first_paragraph(str(error))}", AFTER_DASHES)
    first = error.errors()[0]
    said = _first_paragraph(first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, "))
    if not first["loc"]:
        return BadRequest(f"{AFTER_DASHES}: {said}", AFTER_DASHES)
    flag = "--" + str(first["loc"][0]).replace("_", "-")
    return BadRequest(f"{flag}: {said}, is {str(first['input'])[:LONGEST_VALUE]!r}", flag)


def _first_paragraph(said: str) -> str:
    text = " ".join(said.strip().partition("\n\n")[0].split())
    whole_sentences = text[:LONGEST_SENTENCE].rpartition(". ")[0]
    return text if len(text) <= LONGEST_SENTENCE else (whole_sentences or text[:LONGEST_SENTENCE]) + " ..."


def require_flags(args: Namespace) -> None:
    """Raise :class:`~tercet.protocol.TercetError` for flags that a server with Tercet's connector cannot have.

    These are: the connector in a MultiConnector, siblings that cannot be made, unknown or wrong settings, KV or verbs
    that callers on other machines could reach without a key, and several API servers. Commands that serve nothing
    (``vllm bench``, headless nodes) have no verbs.
    """
    import vllm.envs

    transfer: KVTransferConfig | None = getattr(args, "kv_transfer_config", None)
    require_no_sibling(transfer)
    if transfer is None or not is_tercets(transfer):
        return
    require_hooks("engine")
    settings = parse_settings(settings_of(transfer))
    settings.require_secret_beyond_loopback()
    settings.allowed_prefillers()
    with_siblings(transfer)
    # vLLM adds the verbs to its API server only if VLLM_PLUGINS names the plugin.
    serves_verbs = PLUGIN in (vllm.envs.VLLM_PLUGINS or ())
    if not hasattr(args, "host") or getattr(args, "headless", False) or not serves_verbs:
        return
    callers_of(args, settings.fleet_secret)
    servers = getattr(args, "api_server_count", None)
    if servers not in (None, 1):
        raise BadRequest(
            f"--api-server-count: is {servers}, and one API server keeps the leases of an engine; set it to 1",
            "--api-server-count",
        )


def require_supported(config: VllmConfig, caches: KVCacheConfig) -> None:
    """Raise :class:`~tercet.vllm_plugin.hooks.UnsupportedVLLM` for the first unmet requirement."""
    require_supported_config(config)
    require_movable_groups(caches)
    require_kernels_of_states(caches)
    require_states_to_be_kept(config, caches)


def require_supported_config(config: VllmConfig) -> None:
    """Raise as :func:`require_supported` does, for requirements that can be checked before weights are loaded."""
    require_both_roles(config)
    require_prefill_behind_kv(config)
    require_positions_of_the_prompt(config)
    require_whole_blocks(config)
    require_generation(config)
    require_one_rank(config)
    require_drafter(config)
    require_memory_that_stays(config)


def require_both_roles(config: VllmConfig) -> None:
    """Require both roles: else vLLM frees blocks that a step still writes, and a peer's KV is overwritten."""
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_role != "kv_both":
        raise UnsupportedVLLM(
            f"--kv-transfer-config: kv_role is {transfer.kv_role!r}, and an engine of Tercet must send and receive KV: "
            "set it to 'kv_both'"
        )


def require_prefill_behind_kv(config: VllmConfig) -> None:
    """Require kernels that continue after existing KV: MLA's on a CPU return wrong tokens, and no error."""
    if config.model_config.use_mla and current_platform.is_cpu() and not config.scheduler_config.enable_chunked_prefill:
        raise UnsupportedVLLM(
            "on this CPU vLLM cannot compute tokens of an MLA model after existing KV (it has turned "
            "chunked prefill and prefix caching off), so it could not continue from received KV: use plain vLLM"
        )


def require_positions_of_the_prompt(config: VllmConfig) -> None:
    """Require positions that depend only on the prompt: a receiver does not have an encoder's results."""
    multimodal = config.model_config.multimodal_config
    if multimodal is not None and config.model_config.uses_mrope and (multimodal.video_pruning_rate or 0) > 0:
        raise UnsupportedVLLM(
            "--video-pruning-rate with a model with M-RoPE: positions of tokens then depend on the encoder's result "
            "for a video, which an engine that continues from another one's KV does not have; start it without the flag"
        )


def require_whole_blocks(config: VllmConfig) -> None:
    """Require prefixes of whole blocks: otherwise KV would begin inside a block of a lease."""
    cache = config.cache_config
    unit = getattr(cache, "prefix_match_unit", None)
    if unit not in (None, cache.block_size):
        raise UnsupportedVLLM(
            f"--prefix-match-unit is {unit}, and Tercet's leases begin at whole blocks of {cache.block_size}; "
            "start the engine without it"
        )


def require_kernels_of_states(caches: KVCacheConfig) -> None:
    """Require kernels for the model's states; otherwise vLLM fails at its first prompt, with a traceback."""
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
    """Require steps that need no state within a block: vLLM's CPU kernels return only the last state."""
    specs = [group.kv_cache_spec for group in caches.kv_cache_groups]
    steps = config.scheduler_config.max_num_batched_tokens
    for spec in specs:
        within = getattr(spec, "num_prefill_checkpoint_blocks", 0) > 0
        if within and current_platform.is_cpu() and steps > spec.block_size:
            raise UnsupportedVLLM(
                "on a CPU vLLM fails if one step computes more than a block of a prompt, for a model with Mamba-2 "
                f"layers; start the engine with --max-num-batched-tokens {spec.block_size}"
            )


def require_memory_that_stays(config: VllmConfig) -> None:
    """Require KV that stays where it is: other processes map the memory, which an allocator can replace."""
    if getattr(config.model_config, "enable_cumem_allocator", False) and not current_platform.is_cpu():
        raise UnsupportedVLLM(
            "--enable-sleep-mode and --enable-cumem-allocator: KV in such memory cannot be mapped by the process that "
            "moves it; start the engine without them"
        )


def require_generation(config: VllmConfig) -> None:
    """Require an engine that generates: other engines have no KV to continue from."""
    if config.model_config.runner_type != "generate":
        raise UnsupportedVLLM(
            f"this engine's runner is {config.model_config.runner_type!r}, which has no KV to move: start "
            "it with `vllm serve`, and give its URL to `tercet router` by --pooling-server"
        )


def require_one_rank(config: VllmConfig) -> None:
    """Require one data-parallel rank per server, and blocks that contain all of their tokens."""
    parallel = config.parallel_config
    if parallel.data_parallel_size != 1 and not parallel.data_parallel_external_lb:
        raise UnsupportedVLLM(
            f"--data-parallel-size is {parallel.data_parallel_size}, so one server has several ranks: start "
            "each rank as a separate engine, with its --data-parallel-rank"
        )
    if parallel.decode_context_parallel_size != 1 or parallel.prefill_context_parallel_size != 1:
        raise UnsupportedVLLM(
            "Tercet does not support context parallelism: with --decode-context-parallel-size or "
            "--prefill-context-parallel-size the tokens of a block are spread over ranks"
        )
    if parallel._api_process_count != 1:
        raise UnsupportedVLLM(
            f"--api-server-count is {parallel._api_process_count}, and one API server keeps the leases of an engine: "
            "start it with --api-server-count 1"
        )
