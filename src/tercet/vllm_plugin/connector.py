"""``TercetConnector``: vLLM's KV connector interface, mapped onto the scheduler's and the worker's half.

vLLM loads it by ``--kv-transfer-config`` (``kv_connector_module_path``), once in the scheduler's process and once in
each worker. It relies on: ``on_new_request`` being called before a request is first scheduled; ``build_connector_meta``
before ``num_computed_tokens`` moves; ``take_events`` when a step's outputs are counted, before any client gets them;
``save_kv_layer`` once per layer and step, after that layer's attention, in steps that do not run as one CUDA graph;
``wait_for_save`` after the last layer of any step, with the stream that computes it still the current one.
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

from tercet.vllm_plugin.core.connector_messages import StepMetadata, WorkerHandshake, params_of
from tercet.vllm_plugin.core.scheduler_side import SchedulerSide, TablePublisher
from tercet.vllm_plugin.hooks import UnsupportedVLLM, require_hooks
from tercet.vllm_plugin.start.plugin_settings import parse_settings
from tercet.vllm_plugin.start.siblings_config import KEY
from tercet.vllm_plugin.start.start_checks import require_supported
from tercet.vllm_plugin.worker.kv_layout import AllStages, StageContents, engine_rank, layout_of, over_stages
from tercet.vllm_plugin.worker.kv_planes import LayerPlanes
from tercet.vllm_plugin.worker.model_runner import leave_the_base_model_alone
from tercet.vllm_plugin.worker.worker_side import WorkerSide

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
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request as VLLMRequest

    from tercet.vllm_plugin.core.sibling_waits import SiblingWaits


class TercetConnector(KVConnectorBase_V1, SupportsHMA):
    """One engine's connector, for the scheduler's process or for a worker, by ``role``."""

    _worker: WorkerSide

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_hooks("engine")
        require_supported(vllm_config, kv_cache_config)
        self.settings = parse_settings(self._kv_transfer_config.kv_connector_extra_config)
        if self.settings.beside:
            raise UnsupportedVLLM(f"{KEY}: the plugin was not loaded where the flags were read; add it to VLLM_PLUGINS")
        self.settings.require_secret_beyond_loopback()
        self.inner_host = self.settings.inner_host(vllm_config.parallel_config.nnodes)
        # Requests of the verbs carry it, so that a client's own kv_transfer_params cannot pass for one of them.
        self.token = secrets.token_hex(16)
        self.handshakes: list[WorkerHandshake] = []  # by rank
        self.siblings: tuple[KVConnectorBase_V1, ...] = ()
        """The engine's other connectors, set by :mod:`tercet.vllm_plugin.siblings`."""
        self._scheduler: SchedulerSide | None = None
        if role == KVConnectorRole.WORKER:
            if vllm_config.lora_config is not None and current_platform.is_cpu():
                leave_the_base_model_alone()
            self._worker = WorkerSide(engine_rank(), self.settings, self.inner_host)
            # With ubatching, a layer's hook runs once for each part of a batch, and only the last call means that the
            # layer is done.
            self._in_parts = vllm_config.parallel_config.use_ubatching

    # ---- worker ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        groups = [group.layer_names for group in self._kv_cache_config.kv_cache_groups]
        planes = LayerPlanes(kv_caches, self._kv_cache_config.num_blocks, groups)
        staged = self.settings.is_staged(planes.device.type)
        stages = AllStages(over_stages(StageContents.of(groups, planes)))
        layout = layout_of(self._vllm_config, self._kv_cache_config, planes, stages, staged=staged)
        self._worker.register(planes, layout)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return self._worker.handshake()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepMetadata):
            self._worker.begin_step(connector_metadata)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        if not self._in_parts:  # otherwise the whole step is pushed when it ends
            self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """End the step: all layers are complete. Waits for nothing: blocks stay pinned until they are acknowledged."""
        self._worker.end_step()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Load nothing: peers write directly into reserved blocks."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing: see :meth:`start_load_kv`."""

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return False: other processes have mapped the cache. vLLM calls this from 0.33 on."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False: a full CUDA graph runs no layer hooks, so its KV is announced at the end of the step."""
        return False

    # ---- scheduler -------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Store the workers' endpoints, by stage and tensor-parallel rank; called once, when caches are registered."""
        self.handshakes = [found for _, found in sorted(metadata.items()) if isinstance(found, WorkerHandshake)]

    def attach(self, scheduler: Scheduler) -> SchedulerSide:
        if self._scheduler is None:
            if not self.handshakes:
                raise UnsupportedVLLM("the workers' endpoints have not arrived; is kv_role 'kv_both'?")
            max_blocks = int(self._kv_cache_config.num_blocks * self.settings.max_lease_share)
            words = [rank.words for rank in self.handshakes]
            tables = TablePublisher.begin(scheduler, words, self._vllm_config.parallel_config.nnodes)
            self._scheduler = SchedulerSide(scheduler, max_blocks, tables, self.siblings)
        return self._scheduler

    def on_new_request(self, request: VLLMRequest) -> None:
        """Begin a new request if it has this engine's token, and so belongs to Tercet."""
        params = params_of(request.kv_transfer_params, self.token)
        if params is not None and self._scheduler is not None:
            self._scheduler.begin(request, params)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return StepMetadata() if self._scheduler is None else self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take back what was planned to be sent of KV that siblings could not load."""
        if self._scheduler is not None and connector_output.invalid_block_ids:
            self._scheduler.loads_failed(connector_output.invalid_block_ids)

    def has_pending_push_work(self) -> bool:
        """True while sends or reservations wait for the end of a step, which an idle engine would not begin."""
        scheduler = self._scheduler
        return scheduler is not None and (scheduler.sends.held_back or bool(scheduler.sibling_waits))

    @property
    def sibling_waits(self) -> SiblingWaits | None:
        """Waits of leases for siblings; None without siblings, and before the scheduler is attached."""
        return None if self._scheduler is None else self._scheduler.sibling_waits

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Record that a step has ended, before any client has its tokens. Tercet adds no events."""
        if self._scheduler is not None:
            self._scheduler.stepped()
        return ()

    def request_finished(self, request: VLLMRequest, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        # False: vLLM frees the blocks at once. What a send still reads is pinned by the scheduler's side itself.
        if self._scheduler is not None:
            self._scheduler.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: VLLMRequest, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def get_num_new_matched_tokens(self, request: VLLMRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return 0 tokens to fetch, since peers push KV; None for a request that has to wait for its turn."""
        # vLLM passes over a request that gets None, without blocks, and asks again in the next step.
        if self._scheduler is not None and self._scheduler.queue.holds_back(request):
            return None, False
        return 0, False

    def update_state_after_alloc(self, request: VLLMRequest, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Record nothing."""

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a preempted sender recomputes, and planned blocks stay pinned, so nothing is lost."""
        return False

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.WORKER:
            self._worker.close()
