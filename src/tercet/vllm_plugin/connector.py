"""``TercetConnector``: vLLM's KV connector interface, mapped onto the scheduler's and the worker's half.

vLLM loads it by ``--kv-transfer-config`` (``kv_connector_module_path``), once in the scheduler's process and once in
each worker. It relies on: ``on_new_request`` being called before a request is first scheduled;
``build_connector_meta`` before ``num_computed_tokens`` moves; ``take_events`` when a step's outputs are counted, before
anybody gets them; ``save_kv_layer`` once per layer and step, after that
layer's attention, in steps that do not run as one CUDA graph; ``wait_for_save`` after the last layer of any step, with
the stream that computes it still the current one.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from tercet.vllm_plugin.engine.cache_groups import require_movable_groups
from tercet.vllm_plugin.engine.connector_messages import StepMetadata, WorkerHandshake, params_of
from tercet.vllm_plugin.engine.drafters import require_drafter
from tercet.vllm_plugin.engine.kv_layout import layout_of
from tercet.vllm_plugin.engine.kv_planes import LayerPlanes
from tercet.vllm_plugin.engine.lora_on_cpu import leave_the_base_model_alone
from tercet.vllm_plugin.engine.plugin_settings import parse_settings
from tercet.vllm_plugin.engine.scheduler_side import SchedulerSide
from tercet.vllm_plugin.engine.stages import AllStages, StageContents, engine_rank, over_stages
from tercet.vllm_plugin.engine.table_publisher import TablePublisher
from tercet.vllm_plugin.engine.worker_side import WorkerSide
from tercet.vllm_plugin.hooks import UnsupportedVLLM, require_hooks

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request as VLLMRequest


class TercetConnector(KVConnectorBase_V1, SupportsHMA):
    """One engine's connector, in either role; workers alone have a worker's half."""

    _worker: WorkerSide

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_hooks("engine")
        _require_both_roles(vllm_config)
        require_movable_groups(kv_cache_config)
        _require_prefill_behind_kv(vllm_config)
        _require_positions_of_the_prompt(vllm_config)
        _require_whole_blocks(vllm_config)
        _require_kernels_of_states(kv_cache_config)
        _require_states_to_be_kept(vllm_config, kv_cache_config)
        _require_generation(vllm_config)
        _require_one_rank(vllm_config)
        require_drafter(vllm_config)
        _require_memory_that_stays(vllm_config)
        self.settings = parse_settings(self._kv_transfer_config.kv_connector_extra_config)
        self.settings.require_secret_beyond_loopback()
        self.token = secrets.token_hex(16)
        self.handshakes: list[WorkerHandshake] = []  # by rank
        self._scheduler: SchedulerSide | None = None
        if role == KVConnectorRole.WORKER:
            if vllm_config.lora_config is not None and current_platform.is_cpu():
                leave_the_base_model_alone()
            self._worker = WorkerSide(engine_rank(), self.settings)
            # Then a layer's hook runs once for each part of a batch, and only the last of them means that it is done.
            self._in_parts = vllm_config.parallel_config.use_ubatching

    # ---- worker ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Start the agent over this rank's KV cache."""
        groups = [group.layer_names for group in self._kv_cache_config.kv_cache_groups]
        planes = LayerPlanes(kv_caches, self._kv_cache_config.num_blocks, groups)
        staged = self.settings.is_staged(planes.device.type)
        stages = AllStages(over_stages(StageContents.of(groups, planes)))
        layout = layout_of(self._vllm_config, self._kv_cache_config, planes, stages, staged=staged)
        self._worker.register(planes, layout)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        """This rank's endpoints."""
        return self._worker.handshake()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepMetadata):
            self._worker.begin_step(connector_metadata)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """One layer's KV is complete for this step."""
        if not self._in_parts:
            self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """All layers are; nothing waits here, since blocks stay pinned until they are acknowledged."""
        self._worker.end_step()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing is loaded: peers write straight into reserved blocks."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See :meth:`start_load_kv`."""

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """It does not: others have mapped the cache. vLLM asks from 0.33 on, before it loads anything."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """They do not run inside a full CUDA graph; what one has computed is told at its step's end."""
        return False

    # ---- scheduler -------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The workers' endpoints, by stage and tensor-parallel rank; called once, when all caches are registered."""
        self.handshakes = [found for _, found in sorted(metadata.items()) if isinstance(found, WorkerHandshake)]

    def attach(self, scheduler: Scheduler) -> SchedulerSide:
        """What is held for others at the scheduler, of which the first call takes hold."""
        if self._scheduler is None:
            if not self.handshakes:
                raise UnsupportedVLLM("the workers' endpoints have not arrived; is kv_role 'kv_both'?")
            max_blocks = int(self._kv_cache_config.num_blocks * self.settings.max_lease_share)
            tables = TablePublisher.begin(scheduler, [rank.words for rank in self.handshakes])
            self._scheduler = SchedulerSide(scheduler, max_blocks, tables)
        return self._scheduler

    def on_new_request(self, request: VLLMRequest) -> None:
        """A request arrived; of ours are those that bear this engine's token."""
        params = params_of(request.kv_transfer_params, self.token)
        if params is not None and self._scheduler is not None:
            self._scheduler.begin(request, params)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """A step's orders for the workers."""
        return StepMetadata() if self._scheduler is None else self._scheduler.plan(scheduler_output)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """A step is over, and no client has its tokens yet. There are no events of ours."""
        if self._scheduler is not None:
            self._scheduler.stepped()
        return ()

    def request_finished(self, request: VLLMRequest, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks are freed by vLLM as usual."""
        if self._scheduler is not None:
            self._scheduler.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: VLLMRequest, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See :meth:`request_finished`."""
        return self.request_finished(request, block_ids[0])

    def get_num_new_matched_tokens(self, request: VLLMRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Nothing is fetched: what a peer pushed is attached to the request when it arrives.

        ``None`` for a request that has to wait for its turn; vLLM asks again in the next step.
        """
        if self._scheduler is not None and self._scheduler.queue.holds_back(request):
            return None, False
        return 0, False

    def update_state_after_alloc(self, request: VLLMRequest, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Nothing to note."""

    @property
    def requires_kv_delivery(self) -> bool:
        """A preempted sender recomputes; blocks already planned stay pinned, so nothing is lost."""
        return False

    def shutdown(self) -> None:
        """Stop the agent."""
        if self.role == KVConnectorRole.WORKER:
            self._worker.close()


def _require_both_roles(config: VllmConfig) -> None:
    # Else vLLM gives blocks away that a step under way still writes into, and a peer's KV may be under that.
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_role != "kv_both":
        raise UnsupportedVLLM(
            f"--kv-transfer-config: kv_role is {transfer.kv_role!r}, and an engine of Tercet's sends and receives KV: "
            "set it to 'kv_both'"
        )


def _require_prefill_behind_kv(config: VllmConfig) -> None:
    # vLLM's reference kernels of MLA compute a prompt's rest as if nothing came before it: wrong tokens, and no error.
    if config.model_config.use_mla and current_platform.is_cpu() and not config.scheduler_config.enable_chunked_prefill:
        raise UnsupportedVLLM(
            "on this CPU vLLM computes no tokens of an MLA model behind KV that is there already (it has turned "
            "chunked prefill and prefix caching off), so none could go on from KV that was sent. Serve it with vLLM"
        )


def _require_positions_of_the_prompt(config: VllmConfig) -> None:
    # vLLM then moves positions by what its encoder makes of a video, which who goes on from sent KV has not computed.
    multimodal = config.model_config.multimodal_config
    if multimodal is not None and config.model_config.uses_mrope and (multimodal.video_pruning_rate or 0) > 0:
        raise UnsupportedVLLM(
            "--video-pruning-rate with a model with M-RoPE: positions of tokens then depend on what the encoder makes "
            "of a video, and an engine that goes on from KV of another does not know them; start it without"
        )


def _require_whole_blocks(config: VllmConfig) -> None:
    # Found in the middle of a block, KV would begin where no block of a lease does.
    cache = config.cache_config
    unit = getattr(cache, "prefix_match_unit", None)
    if unit not in (None, cache.block_size):
        raise UnsupportedVLLM(
            f"--prefix-match-unit is {unit}, and Tercet's leases begin with whole blocks of {cache.block_size}; "
            "start the engine without it"
        )


def _require_kernels_of_states(caches: KVCacheConfig) -> None:
    # vLLM fails at the first prompt otherwise, and its engine ends with a traceback.
    kinds = {getattr(group.kv_cache_spec, "mamba_type", None) for group in caches.kv_cache_groups}
    if MambaAttentionBackendEnum.MAMBA1 in kinds and current_platform.is_cpu() and not _scans_states():
        raise UnsupportedVLLM(
            "this vLLM's CPU build has no kernel for Mamba-1 layers (selective_scan_fwd), and fails at any prompt of "
            "this model; serve it on an accelerator"
        )


def _scans_states() -> bool:
    import torch

    return hasattr(torch.ops._C, "selective_scan_fwd")


def _require_states_to_be_kept(config: VllmConfig, caches: KVCacheConfig) -> None:
    # vLLM's CPU kernels return no state but the last of a step, and the worker fails where it wants one from within.
    specs = [group.kv_cache_spec for group in caches.kv_cache_groups]
    steps = config.scheduler_config.max_num_batched_tokens
    for spec in specs:
        within = getattr(spec, "num_prefill_checkpoint_blocks", 0) > 0
        if within and current_platform.is_cpu() and steps > spec.block_size:
            raise UnsupportedVLLM(
                "on a CPU vLLM fails at prompts of which one step computes more than a block, if the model has Mamba-2 "
                f"layers; start the engine with --max-num-batched-tokens {spec.block_size}"
            )


def _require_memory_that_stays(config: VllmConfig) -> None:
    # vLLM's own allocator takes memory away and brings other memory back, and what others have mapped is neither.
    if getattr(config.model_config, "enable_cumem_allocator", False) and not current_platform.is_cpu():
        raise UnsupportedVLLM(
            "--enable-sleep-mode and --enable-cumem-allocator: KV in such memory cannot be mapped by the process that "
            "moves it; start the engine without"
        )


def _require_generation(config: VllmConfig) -> None:
    if config.model_config.runner_type != "generate":
        raise UnsupportedVLLM(
            f"this engine's runner is {config.model_config.runner_type!r}, and there is no KV of it to be moved: start "
            "it with `vllm serve`, and name it to `tercet router` by --pooling-server"
        )


def _require_one_rank(config: VllmConfig) -> None:
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
