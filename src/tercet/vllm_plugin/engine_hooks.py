"""The engine side of the registry: hooks of a vLLM server, outside of its core's scheduling and blocks."""

from __future__ import annotations

from tercet.vllm_plugin.hooks import Code, Has, Hook, OneOf, Takes
from tercet.vllm_plugin.start.process_output import OF_WORKERS

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"
BASE = f"{CONNECTOR}:KVConnectorBase_V1"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
REQUEST = "vllm.v1.request:Request"
CORE = "vllm.v1.engine.core:EngineCore"
ASYNC_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
CLIENT = "vllm.v1.engine.core_client:AsyncMPClient"
INPUTS = "vllm.v1.engine.input_processor"
OUTPUTS = "vllm.v1.engine.output_processor"
PROCESSOR = f"{OUTPUTS}:OutputProcessor"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
BATCH = "vllm.v1.worker.gpu_input_batch"
QUEUE = "vllm.distributed.device_communicators.shm_broadcast"
LAUNCHER = "vllm.entrypoints.launchers.launcher"
RENDERER = "vllm.renderers.base:BaseRenderer"
REGISTRY = "vllm.model_executor.models.registry"
SERVING_MODELS = "vllm.entrypoints.openai.models.serving:OpenAIServingModels"
LORA_OPS = "vllm.lora.ops.torch_ops.lora_ops"
LORA_REQUEST = "vllm.lora.request:LoRARequest"
CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn"

PASSES_IMAGE_NAMES = (
    Code(f"{RENDERER}._process_multimodal", "mm_uuid_items = self._process_mm_uuids("),
    Code(f"{RENDERER}._process_mm_uuids", "return mm_uuid_items"),
)
"""Routers and engines have the same renderers."""

ENGINE_HOOKS = (
    Hook(
        name="KV connector",
        what="TercetConnector implements KVConnectorBase_V1 in the scheduler's process and in each worker",
        why="Requests are seen before they are scheduled, steps are planned before vLLM counts them as computed, and "
        "layers are reported as soon as their attention has run",
        until="the interface is declared stable",
        relies_on=(
            Has(BASE, "register_kv_caches", "get_handshake_metadata", "wait_for_save"),
            Has(BASE, "bind_connector_metadata", "requires_piecewise_for_cudagraph"),
            Has(BASE, "on_new_request", "request_finished", "shutdown"),
            Has(f"{CONNECTOR}:SupportsHMA", "request_finished_all_groups"),
            Takes(f"{BASE}.save_kv_layer", "layer_name", "kv_layer", "attn_metadata"),
            Takes(f"{BASE}.build_connector_meta", "scheduler_output"),
            Code(f"{SCHEDULER}.schedule", "self._build_kv_connector_meta(", "self._update_after_schedule("),
            Code(f"{SCHEDULER}.add_request", "self.connector.on_new_request(request)"),
            Takes(f"{SCHEDULER}.get_kv_connector"),
            Code(f"{REQUEST}.__init__", 'sampling_params.extra_args.get("kv_transfer_params")'),
            Code("vllm.config.parallel:ParallelConfig", "_api_process_count: int"),
            Has("vllm.config.parallel:ParallelConfig", "use_ubatching"),
            Code("vllm.config.parallel:ParallelConfig", "data_parallel_external_lb: bool"),
            Code("vllm.config:ModelConfig.__post_init__", "self.runner_type = "),
        ),
    ),
    Hook(
        name="pipeline stages",
        what="Workers exchange the names of their layers, and the core gets each worker's description by stage",
        why="A worker's KV cache config has only its own layers, but sending KV between stages needs all layers",
        until="a KV connector gets all stages' layers",
        relies_on=(
            Takes(f"{BASE}.set_xfer_handshake_metadata_pp_aware", "metadata"),
            Code(CORE, "set_xfer_handshake_metadata_pp_aware(content)"),
            Takes("vllm.distributed.parallel_state:get_pp_group"),
            Code("vllm.distributed.parallel_state:GroupCoordinator", "cpu_group: ProcessGroup", "rank_in_group"),
            Has("vllm.config:ParallelConfig", "decode_context_parallel_size", "prefill_context_parallel_size"),
        ),
    ),
    Hook(
        name="endpoints",
        what="TercetEndpoints is an endpoint plugin of vLLM's API server",
        why="The verbs are served where the engine's own API is",
        until="the interface is declared stable",
        relies_on=(
            Has("vllm.plugins.endpoint_plugins.interface:EndpointPlugin", "attach_router", "init_state"),
            Code("vllm.plugins.endpoint_plugins.interface:init_endpoint_plugins_state", ".init_state("),
            Code("vllm.v1.metrics.prometheus:get_prometheus_registry", "return REGISTRY"),
        ),
    ),
    Hook(
        name="output of new requests",
        what="The model runner's batch gets the output with which a resumed request begins",
        why="The worker assumes that a new request has no output; penalties and seeds need the output",
        until="the first model runner is gone: the second one takes output from the scheduler",
        replaces=("GPUModelRunner._update_states", "InputBatch.add_request"),
        relies_on=(
            Takes(f"{RUNNER}._update_states", "scheduler_output"),
            Code(f"{RUNNER}._update_states", "output_token_ids=[]", "self.input_batch.add_request("),
            Takes(f"{BATCH}:InputBatch.add_request", "request"),
            Code(f"{BATCH}:InputBatch.add_request", "request.output_token_ids"),
            Has(f"{BATCH}:CachedRequestState", "req_id", "generator", "output_token_ids"),
        ),
    ),
    Hook(
        name="seeded prompts",
        what="On a CPU a seeded request's generator is put back after each step that ends inside its prompt",
        why="vLLM rewinds it by its offset, which generators on a CPU do not have: the engine would be lost",
        until="vLLM rewinds generators of any device",
        replaces=("GPUModelRunner._sample", "GPUModelRunner._bookkeeping_sync"),
        relies_on=(
            Takes(f"{RUNNER}._sample"),
            Code(f"{RUNNER}._bookkeeping_sync", "discard", "self.input_batch.generators", "set_offset("),
            Code(f"{RUNNER}.__init__", "self.discard_request_mask"),
        ),
    ),
    Hook(
        name="queue readers",
        what="On a CPU readers of vLLM's shared-memory queues sleep as soon as there is nothing to read",
        why="Polling occupies the cores that compute",
        until="vLLM sleeps at once on a CPU, or has an option for it",
        replaces=("SpinCondition.wait",),
        relies_on=(
            Takes(f"{QUEUE}:SpinCondition.__init__", "is_reader", "busy_loop_s"),
            Takes(f"{QUEUE}:SpinCondition.wait", "timeout_ms"),
            Code(f"{QUEUE}:SpinCondition.wait", "self.last_read + self.busy_loop_s", "self.poller.poll("),
            Code(f"{QUEUE}:SpinCondition.__init__", "zmq.CONFLATE"),
        ),
    ),
    Hook(
        name="load",
        what="The API server's process listens to the statistics that come with each step's outputs",
        why="Load is reported with each step, without a call to the engine's core",
        until="AsyncLLM passes its scheduler's statistics to plugins",
        replaces=("OutputProcessor.update_scheduler_stats",),
        relies_on=(
            Takes(f"{PROCESSOR}.update_scheduler_stats", "scheduler_stats"),
            Code(f"{ASYNC_LLM}._run_output_handler", "output_processor.update_scheduler_stats("),
            Takes(f"{PROCESSOR}.get_num_unfinished_requests"),
            Code(f"{PROCESSOR}.get_num_queued_tokens", "req.prompt_len for req in", "if req.is_prefilling"),
            Has("vllm.v1.metrics.stats:SchedulerStats", "num_running_reqs", "kv_cache_usage"),
        ),
    ),
    Hook(
        name="output callback",
        what="Outputs of a streamed sequence are taken where AsyncLLM puts them into its queue",
        why="There is no task per sequence, and no switch to one per token",
        until="AsyncLLM.add_request takes a callback",
        replaces=("RequestOutputCollector.put",),
        relies_on=(
            Takes(f"{ASYNC_LLM}.add_request", "request_id", "prompt", "params", "priority"),
            Code(f"{ASYNC_LLM}.add_request", "RequestOutputCollector(", "return queue"),
            Takes(f"{OUTPUTS}:RequestOutputCollector.put", "output"),
            Code(f"{OUTPUTS}:RequestOutputCollector.__init__", "self.output"),
            Code(f"{PROCESSOR}.process_outputs", "req_state.queue.put("),
            Takes(f"{ASYNC_LLM}.abort", "request_id"),
        ),
    ),
    Hook(
        name="prefilled requests",
        what="A request of the engine's own API that names engines to prefill waits, before it is given to the core, "
        "until its KV has arrived, and then decodes with it",
        why="Behind a gateway no router calls start_generate, and all features of vLLM's API stay available",
        until="a KV connector may hold a request back and name its blocks",
        replaces=("AsyncMPClient.add_request_async",),
        relies_on=(
            Code(
                f"{ASYNC_LLM}._add_request",
                "self.output_processor.add_request(",
                "await self.engine_core.add_request_async(request)",
            ),
            Code(
                f"{ASYNC_LLM}.add_request",
                "await self.engine_core.add_request_async(child_request)",
                "await self.abort(",
            ),
            Takes(f"{CLIENT}.add_request_async", "request"),
            Takes(f"{PROCESSOR}.abort_requests", "request_ids", "internal"),
            Code(f"{PROCESSOR}.__init__", "self.request_states"),
            Code(
                f"{PROCESSOR}.process_outputs",
                "if req_state.remote_prefill_cached_tokens is not None:",
                "req_state.num_cached_tokens = req_state.remote_prefill_cached_tokens",
            ),
            Has("vllm.v1.engine:EngineCoreRequest", "prompt_token_ids", "mm_features", "lora_request", "cache_salt"),
            Has("vllm.v1.engine:EngineCoreRequest", "prompt_embeds", "resumable", "sampling_params", "priority"),
            Has("vllm.sampling_params:SamplingParams", "extra_args"),
        ),
    ),
    Hook(
        name="adapters",
        what="Adapters are found, loaded and unloaded where vLLM's own API has them, one that is loaded in place gets "
        "a new number, and a lease's request names one",
        why="KV of an adapter has the same names on every engine, no request continues with other weights, and the "
        "adapters in use are reported",
        until="an engine's adapters are known outside of its OpenAI layer",
        replaces=("AsyncLLM.add_lora", "OpenAIServingModels.load_lora_adapter"),
        relies_on=(
            Code(SERVING_MODELS, "self.lora_requests: dict[str, LoRARequest]"),
            Takes(f"{SERVING_MODELS}.load_lora_adapter", "request"),
            Code(f"{SERVING_MODELS}.load_lora_adapter", "load_inplace=request.load_inplace"),
            Code(f"{SERVING_MODELS}.__init__", "self.lora_id_counter = AtomicCounter(0)"),
            Code(f"{PROCESSOR}.__init__", "self.request_states: dict[str, RequestState]"),
            Code(f"{OUTPUTS}:RequestState.__init__", "self.lora_name = "),
            Takes(f"{SERVING_MODELS}.unload_lora_adapter", "request"),
            Code(f"{SERVING_MODELS}.load_lora_adapter", "await self.engine_client.add_lora(lora_request)"),
            Code(f"{SERVING_MODELS}.resolve_lora", "await self.engine_client.add_lora(lora_request)"),
            Takes(f"{ASYNC_LLM}.add_lora", "lora_request"),
            Takes(LORA_REQUEST, "lora_name", "lora_int_id", "lora_path", "is_3d_lora_weight", "load_inplace"),
            Takes("vllm.lora.utils:get_adapter_absolute_path", "lora_path"),
            Takes(f"{REQUEST}.__init__", "lora_request"),
            Takes(f"{ASYNC_LLM}.add_request", "lora_request"),
            Code(
                "vllm.v1.core.kv_cache_utils:_gen_lora_extra_hash_keys",
                "lora_request.lora_name",
                "lora_request.lora_path",
            ),
            Code(f"{PROCESSOR}.__init__", "self.lora_states = LoRARequestStates("),
            Code("vllm.v1.metrics.stats:LoRAStats.__init__", "self.waiting", "self.running"),
        ),
    ),
    Hook(
        name="images",
        what="Images come as tensors that a router's processor has made; a lease's request names them",
        why="All images have the same placeholder tokens, but different KV",
        until="AsyncLLM accepts processed features together with token ids by a stable interface",
        relies_on=(
            Takes(
                "vllm.inputs:mm_input", "prompt_token_ids", "mm_kwargs", "mm_hashes", "mm_placeholders", "cache_salt"
            ),
            Code(f"{INPUTS}:InputProcessor.process_inputs", 'decoder_input["mm_hashes"]', "mm_hash=base_mm_hash"),
            Code(f"{INPUTS}:InputProcessor._get_mm_identifier", "enable_tower_connector_lora"),
            Code("vllm.v1.core.kv_cache_utils:_gen_mm_extra_hash_keys", "mm_feature.identifier"),
            Takes(f"{REQUEST}.__init__", "mm_features"),
            Has("vllm.multimodal.inputs:MultiModalFeatureSpec", "identifier", "mm_position", "mm_hash"),
            Has("vllm.multimodal.inputs:PlaceholderRange", "offset", "length", "is_embed"),
            Takes("vllm.v1.serial_utils:MsgpackDecoder.__init__", "t"),
        ),
    ),
    Hook(
        name="names of images",
        what="A renderer shortens long names that clients give to images and the like (uuid) before it uses them",
        why="vLLM's caches have these names as keys, and do not count their bytes",
        until="vLLM limits these names",
        replaces=("BaseRenderer._process_mm_uuids",),
        relies_on=PASSES_IMAGE_NAMES,
    ),
    Hook(
        name="base model with adapters",
        what="On a CPU rows without an adapter get zeros from the first of LoRA's two products, and give zeros to the "
        "second one of embeddings",
        why="vLLM marks them by -1, which its operators for CPUs interpret as the last adapter: wrong tokens, wrong KV",
        until="vLLM's operators for CPUs leave such rows alone",
        replaces=("lora_ops.bgmv_shrink", "punica_cpu.bgmv_shrink", "lora_ops.bgmv_expand", "punica_cpu.bgmv_expand"),
        relies_on=(
            Takes(f"{LORA_OPS}:bgmv_shrink", "inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor"),
            Code(f"{LORA_OPS}:sgmv_shrink", "bgmv_shrink(inputs, lora_a_weights, output_tensor, exploded_indices"),
            Takes(f"{LORA_OPS}:bgmv_expand", "inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor"),
            Code(f"{LORA_OPS}:sgmv_expand", "bgmv_expand(inputs, lora_b_weights, output_tensor, exploded_indices"),
            Code("vllm.lora.punica_wrapper.utils:convert_mapping", "if index_mapping_indices[i] > 0", "else -1"),
        ),
    ),
    Hook(
        name="SIGTERM",
        what="The API server's handler of SIGTERM is replaced as its server starts up; vLLM's own runs, by SIGINT, "
        "when the engine is empty",
        why="Running sequences continue on other engines before this one stops",
        until="vLLM calls its plugins before it stops",
        relies_on=(
            Code(
                f"{LAUNCHER}:serve_http",
                "loop.create_task(server.serve(",
                "loop.add_signal_handler(signal.SIGINT, signal_handler)",
                "loop.add_signal_handler(signal.SIGTERM, signal_handler)",
                "await server_task",
            ),
            Takes(f"{LAUNCHER}:NoSignalServer.capture_signals"),
            Code(f"{LAUNCHER}:terminate_if_errored", "engine.errored"),
            Code("vllm.entrypoints.launchers.app:build_app", "lifespan=lifespan"),
        ),
    ),
    Hook(
        name="KV layout",
        what="The kernel that writes blocks is tested for the arrangement of keys and values in them",
        why="KV of one engine is valid in another only in the same arrangement, or in one that can be converted",
        until="the attention backend describes its layout",
        relies_on=(
            Takes(f"{CPU_ATTENTION}:_get_attn_isa", "dtype", "block_size"),
            Takes("vllm._custom_ops:cpu_attn_reshape_and_cache", "key_cache", "value_cache", "slot_mapping", "isa"),
        ),
    ),
)


# ---- core ------------------------------------------------------------------------------------------------------------


MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
GRAMMAR = "vllm.v1.structured_output.backend_types:StructuredOutputGrammar"
EVENTS = "vllm.distributed.kv_events:ZmqEventPublisher"
SPECS = "vllm.v1.kv_cache_interface"
QUEUED = "vllm.v1.core.sched.request_queue:RequestQueue"
SINGLE = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"
POOL = "vllm.v1.core.block_pool:BlockPool"
EXECUTOR = "vllm.v1.executor.abstract:Executor"
STRUCTURED = "vllm.v1.structured_output:StructuredOutputManager"
CONNECTORS = "vllm.distributed.kv_transfer.kv_connector"
FACTORY = f"{CONNECTORS}.factory:KVConnectorFactory"
MULTI = f"{CONNECTORS}.v1.multi_connector:MultiConnector"
OFFLOADING = f"{CONNECTORS}.v1.offloading.scheduler"
OFFLOADER = f"{OFFLOADING}:OffloadingConnectorScheduler"

CORE_HOOKS = (
    Hook(
        name="core methods",
        what="EngineCore gets methods that the API server calls as utility calls, on the core's thread",
        why="Blocks are reserved and given back between two engine steps, so nothing races with scheduling",
        until="a KV connector may serve its own calls",
        replaces=("EngineCore.tercet_*",),
        relies_on=(
            Code("vllm.v1.engine.core:EngineCoreProc._handle_client_request", "getattr(self, method_name)"),
            Takes(f"{CLIENT}.call_utility_async", "method"),
            Code(f"{CORE}.__init__", "self.request_block_hasher"),
            Takes(f"{SCHEDULER}.get_request_counts"),
            Has(SCHEDULER, "pause_state"),
            Has("vllm.v1.core.sched.interface:PauseState", "UNPAUSED", "PAUSED_NEW", "PAUSED_ALL"),
            Has("vllm.v1.executor.abstract:Executor", "is_sleeping"),
            Takes(f"{REQUEST}.__init__", "cache_salt", "block_hasher", "pooling_params"),
        ),
    ),
    Hook(
        name="reservations",
        what="A lease is a request that is never scheduled: it takes blocks as an asynchronous KV load does, and the "
        "request that decodes on them inherits its block table",
        why="A peer writes into the blocks before the request that needs them exists",
        until="KVCacheManager can reserve blocks and hand them over",
        relies_on=(
            Takes(f"{MANAGER}.allocate_slots", "num_external_computed_tokens", "delay_cache_blocks", "reserved_blocks"),
            Takes(f"{MANAGER}.allocate_slots", "new_computed_blocks", "num_lookahead_tokens", "has_scheduled_reqs"),
            OneOf(
                Takes(f"{MANAGER}.allocate_slots", "skip_zeroing_group_ids"),
                Takes(f"{MANAGER}.get_zeroing_block_ids_in_range", "request_id", "start_token", "end_token"),
            ),
            Takes(f"{MANAGER}.get_computed_blocks", "request"),
            Takes(f"{MANAGER}.cache_blocks", "request", "num_computed_tokens"),
            Takes(f"{MANAGER}.record_blocks_for_zeroing", "request_id", "start_token"),
            Takes(f"{MANAGER}.get_block_ids", "request_id"),
            Takes(f"{MANAGER}.free", "request"),
            Takes(f"{POOL}.is_block_writable", "block"),
            Code(f"{SINGLE}.__init__", "self.req_to_blocks", "self.num_cached_block"),
            Code(f"{SINGLE}.cache_blocks", "reachable_boundaries.append(request.shared_prefix_boundary)"),
            Takes(f"{SINGLE}.get_num_skipped_tokens", "num_computed_tokens"),
            Takes(f"{POOL}.get_cached_block", "block_hash", "kv_cache_group_ids"),
            Has(f"{SPECS}:KVCacheSpecKind", "FULL_ATTENTION", "MLA_ATTENTION", "SLIDING_WINDOW"),
            Takes(f"{SPECS}:get_kv_cache_spec_kind", "kv_cache_spec"),
            Takes(f"{SPECS}:get_kv_cache_spec_sliding_window", "kv_cache_spec"),
            Takes(f"{SCHEDULER}._inflight_prefill_reserved_blocks"),
            Code(f"{SCHEDULER}.schedule", "request_queue = self.kv_holding_waiting"),
            Takes(f"{SCHEDULER}._holds_kv_blocks"),
            Code(f"{SCHEDULER}.__init__", "self.kv_holding_waiting", "self.needs_kv_cache_zeroing"),
            # Blocks become free once no running step writes into them: peers do not wait for streams.
            Code(f"{SCHEDULER}.__init__", "kv_transfer_config.is_kv_consumer", "self.defer_block_free = True"),
            Code(f"{SCHEDULER}._free_request_blocks", "self.deferred_frees.append("),
            Code(f"{SCHEDULER}.__init__", "self.num_spec_tokens", "self.num_lookahead_tokens"),
            Takes(f"{QUEUED}.remove_request", "request"),
        ),
    ),
    Hook(
        name="background requests",
        what="While requests of batches run, the planning of a step passes them over or gives them what others leave, "
        "and preempts them for others that wait",
        why="Only the scheduler knows each step: a client's first token waits for no prompt of a batch",
        until="vLLM's scheduler can leave running requests out of a step by priority",
        replaces=("Scheduler.schedule",),
        relies_on=(
            Takes(f"{SCHEDULER}.schedule", "throttle_prefills"),
            Code(
                f"{SCHEDULER}.schedule",
                "self.current_step += 1",
                "token_budget = self.max_num_scheduled_tokens",
                "if self.current_step < request.next_decode_eligible_step:",
                "preempted_req = self.running.pop()",
                "preempted_req_ids=self.reset_preempted_req_ids",
            ),
            Code(f"{CORE}.step", "self.scheduler.schedule("),
            Takes(f"{SCHEDULER}._preempt_request", "request", "timestamp", "drop_stale_output"),
            Code(f"{SCHEDULER}._preempt_request", "self.waiting.prepend_request(request)"),
            Code(f"{SCHEDULER}._update_after_schedule", "request.is_prefill_chunk = "),
            Takes(f"{SCHEDULER}._request_blocks_can_be_freed", "request"),
            Takes(f"{SCHEDULER}._request_remaining_blocks", "request"),
            Code(f"{SCHEDULER}.__init__", "self.requires_kv_delivery", "self.need_mamba_block_aligned_split"),
            Code(f"{REQUEST}.__init__", "self.num_output_placeholders", "self.next_decode_eligible_step"),
            Has(REQUEST, "num_tokens_with_spec"),
            Takes(f"{QUEUED}.remove_requests", "requests"),
        ),
    ),
    Hook(
        name="order of reservations",
        what="A reservation waits, unanswered, for its turn among vLLM's waiting requests, and holds later ones back",
        why="Neither may keep the other waiting for blocks for ever",
        until="KVCacheManager can reserve blocks in the order of admission",
        relies_on=(
            Code("vllm.v1.engine.core:EngineCoreProc._invoke_utility_method", "isinstance(result, Future)"),
            Code(f"{SCHEDULER}.schedule", "get_num_new_matched_tokens(", "if ext_tokens is None:"),
            Takes(f"{SCHEDULER}._request_remaining_blocks", "request"),
            Takes(f"{SCHEDULER}._free_request_blocks", "request"),
            Takes(f"{QUEUED}.prepend_request", "request"),
            Code(f"{SCHEDULER}.__init__", "self.policy", "self.waiting"),
            Code(f"{REQUEST}.__init__", "self.arrival_time"),
        ),
    ),
    Hook(
        name="sends",
        what="Blocks of a request that sends its KV are pinned in addition to the request's own reference",
        why="The request may finish, or be preempted, before its last byte has left",
        until="a KV connector may hold blocks of running requests one by one",
        relies_on=(
            Takes(f"{POOL}.touch", "blocks"),
            Takes(f"{POOL}.free_blocks", "ordered_blocks"),
            Takes(f"{MANAGER}.get_blocks", "request_id"),
            Code(f"{REQUEST}.__init__", "self.num_in_flight_tokens"),
            # Which cached blocks unfinished steps still fill: those are not sent.
            Code(f"{SINGLE}.__init__", "self.req_to_blocks"),
            Code(f"{SCHEDULER}.__init__", "self.num_spec_tokens"),
            Code(f"{SCHEDULER}._update_after_schedule", "request.num_computed_tokens += num_scheduled_token"),
        ),
    ),
    Hook(
        name="siblings",
        what="Other KV connectors of an engine are children of a subclass of MultiConnector: Tercet's registers first "
        "and plans last, each gets its handshakes, and a lease's answer waits until no job of OffloadingConnector uses "
        "its blocks",
        why="A peer writes into leased blocks, while a tier may still read what they held before",
        until="connectors hold the blocks that they read, and MultiConnector passes handshakes on by connector",
        overrides=(
            "MultiConnector.get_handshake_metadata",
            "MultiConnector.set_xfer_handshake_metadata_pp_aware",
            "MultiConnector.get_num_new_matched_tokens",
            "MultiConnector.build_connector_meta",
            "MultiConnector.take_events",
            "MultiConnector.get_finished_count",
            "MultiConnector.reset_cache",
        ),
        relies_on=(
            Code(
                f"{FACTORY}.get_connector_class",
                "if connector_module_path:",
                "getattr(connector_module, connector_name)",
            ),
            Code(f"{FACTORY}.supports_hma_config", "MultiConnector.all_children_support_hma(kv_transfer_config)"),
            Code(
                f"{MULTI}._get_connector_classes_and_configs",
                '"connectors"',
                "KVTransferConfig(**ktc, engine_id=engine_id)",
            ),
            Code(f"{MULTI}.__init__", "self._connectors: list", "self._extra_async_saves: dict"),
            Code(f"{MULTI}.register_kv_caches", "for c in self._connectors: c.register_kv_caches("),
            Code(f"{MULTI}.bind_connector_metadata", "zip(self._connectors, connector_metadata.metadata)"),
            Code(f"{MULTI}.build_connector_meta", "metadata.extra_async_saves = self._extra_async_saves"),
            Takes(f"{MULTI}.get_num_new_matched_tokens", "request", "num_computed_tokens"),
            Code(
                f"{MULTI}.get_num_new_matched_tokens",
                "if toks is None:",
                "return (None, False)",
                "self._requests_to_connector[request.request_id] = i",
            ),
            Takes(f"{MULTI}.set_xfer_handshake_metadata_pp_aware", "metadata"),
            Takes(f"{MULTI}.get_finished_count"),
            Takes(f"{MULTI}.reset_cache"),
            Has(BASE, "has_pending_push_work", "update_connector_output"),
            Has("vllm.v1.core.sched.output:SchedulerOutput", "has_sync_kv_loads", "finished_req_ids"),
            Has("vllm.v1.core.sched.output:CachedRequestData", "resumed_req_ids"),
            Has("vllm.v1.outputs:KVConnectorOutput", "invalid_block_ids"),
            Code(f"{SCHEDULER}.has_requests", "self.connector.has_pending_push_work()"),
            Code(f"{SCHEDULER}._update_after_schedule", "self.finished_req_ids = set()"),
            Has(f"{OFFLOADING}:TransferJobStatus", "fenced_block_ids", "deferred_fence_block_ids"),
            Has(f"{OFFLOADING}:RequestGroupState", "block_ids", "next_stored_chunk_idx"),
            Code(
                f"{OFFLOADER}.__init__",
                "self._sliding_window_groups: tuple[int, ...]",
                "self._req_status: dict",
                "self._jobs: dict[int, TransferJobStatus]",
            ),
            Code(OFFLOADER, "def update_connector_output(", "del self._jobs[job_id]"),
        ),
    ),
    Hook(
        name="published block tables",
        what="The block tables of running sequences are published with each step, and revoked whenever the block pool "
        "hands blocks out",
        why="KV of sequences stays readable while the core is stuck, and is not accepted any more once its "
        "blocks may be rewritten: vLLM writes into no block that a request held and the pool has not allocated since",
        until="a KV connector is notified before the blocks of a request are given to another one",
        replaces=("BlockPool.get_new_blocks",),
        relies_on=(
            Takes(f"{POOL}.get_new_blocks", "num_blocks"),
            Code(f"{POOL}.get_new_blocks", "self.free_block_queue.popleft_n(num_blocks)"),
            Code(f"{SINGLE}.__init__", "self.block_pool = block_pool", "self.req_to_blocks"),
            Takes(f"{BASE}.take_events"),
            Code(f"{SCHEDULER}.update_from_output", "self.connector.take_events()", "return engine_core_outputs"),
            Code(f"{SCHEDULER}.__init__", "self.max_num_running_reqs", "self.max_model_len"),
            Code(f"{SCHEDULER}._preempt_request", "request.num_computed_tokens = 0", "request.num_preemptions += 1"),
            Code(f"{REQUEST}.__init__", "self.num_in_flight_tokens", "self.num_computed_tokens"),
        ),
    ),
    Hook(
        name="resumed requests",
        what="A request starts with output tokens of another engine, and its grammar after them",
        why="A sequence that moves keeps its max_tokens, penalties, stop conditions and structure",
        until="a request may be added with output",
        copies=("Request.structured_output_request", "StructuredOutputRequest.grammar"),
        relies_on=(
            Takes(f"{REQUEST}.append_output_token_ids", "token_ids"),
            Code(f"{REQUEST}.__init__", "self.structured_output_request", "self.prefill_stats"),
            Takes("vllm.v1.metrics.stats:PrefillStats.set"),
            Code("vllm.v1.structured_output.request:StructuredOutputRequest", "self._grammar = self._grammar.result()"),
            Takes(f"{GRAMMAR}.accept_tokens", "request_id"),
            Takes(f"{STRUCTURED}.accept_tokens", "request", "new_token_ids"),
            Code(f"{STRUCTURED}.accept_tokens", "spec_tokens_committed=True", "structured_req.reasoning_ended = True"),
            Code(f"{SCHEDULER}.__init__", "self.structured_output_manager"),
        ),
    ),
    Hook(
        name="sequences",
        what="The scheduler's requests are read, and identified by the beginning of their ids",
        why="An engine reports what it generates, with the blocks that each sequence holds",
        until="vLLM reports its requests one by one",
        relies_on=(
            Code(f"{SCHEDULER}.__init__", "self.requests: dict[str, Request]"),
            Takes(f"{MANAGER}.get_blocks", "request_id"),
            Has("vllm.v1.request:RequestStatus", "RUNNING"),
            Code(
                "vllm.v1.engine.input_processor:InputProcessor.assign_request_id",
                'request.request_id = f"{request.external_req_id}-',
            ),
        ),
    ),
    Hook(
        name="KV events",
        what="The endpoints of vLLM's publisher are read from its sockets, and events between steps are published",
        why="The system chooses the ports, and KV that arrives at an idle engine belongs to no step",
        until="the publisher reports its addresses",
        relies_on=(
            Code(EVENTS, "self._replay", "self._pub"),
            Takes(f"{EVENTS}.publish", "events"),
            Code(f"{SCHEDULER}.__init__", "self.kv_event_publisher"),
            Takes(f"{MANAGER}.take_events"),
        ),
    ),
    Hook(
        name="grammars' time",
        what="A grammar is first compiled and followed by a process that the kernel ends at its limits, and only then "
        "in the core; a request ends if its grammar is refused, allows no first token, or becomes slow, and its client "
        "gets the reason",
        why="A thread that compiles cannot be ended, and grammars of thirty letters occupy a core for minutes; a "
        "request would wait for its grammar for ever, or end as if the engine had failed",
        until="vLLM bounds the time and the memory of grammars, and refuses those that no text matches",
        replaces=(
            "StructuredOutputManager.grammar_init",
            "Executor.__init__",
            "Scheduler.update_from_output",
            "OutputProcessor.process_outputs",
        ),
        copies=("Request.structured_output_request", "StructuredOutputRequest.structured_output_key"),
        relies_on=(
            Takes(f"{STRUCTURED}.grammar_init", "request"),
            Code(
                f"{STRUCTURED}.grammar_init",
                "if self.backend is None:",
                "if self._use_async_grammar_compilation:",
                "self.executor.submit",
                "request.structured_output_request.grammar = ",
            ),
            Code(f"{STRUCTURED}.grammar_init", "structured_outputs._backend"),
            Takes(f"{STRUCTURED}._create_grammar", "request"),
            Code(f"{STRUCTURED}._create_grammar", "struct_request.structured_output_key", "compile_grammar("),
            Takes(f"{EXECUTOR}.__init__", "vllm_config"),
            Code(f"{CORE}.__init__", "load_general_plugins()", "executor_class(vllm_config)"),
            Code(f"{SCHEDULER}.update_from_output", "accept_tokens(", "RequestStatus.FINISHED_ERROR"),
            Code(
                f"{SCHEDULER}.update_from_output", "stop_reason=request.stop_reason", "self.grammar_compile_error_reqs"
            ),
            Code(f"{SCHEDULER}.__init__", "self.requests: dict[str, Request]", "self.grammar_compile_error_reqs"),
            Has("vllm.v1.engine:EngineCoreOutput", "request_id", "finish_reason", "stop_reason"),
            Takes(f"{PROCESSOR}.process_outputs", "engine_core_outputs"),
            Code(f"{PROCESSOR}.process_outputs", "engine_core_output.stop_reason", "req_state.queue.put("),
            Code(f"{OUTPUTS}:RequestOutputCollector.put", "isinstance(output, Exception)", "elif isinstance("),
            Takes("vllm.v1.structured_output.backend_types:StructuredOutputBackend.allocate_token_bitmask"),
            Takes(f"{GRAMMAR}.fill_bitmask", "bitmask"),
            Takes(f"{GRAMMAR}.accept_tokens", "request_id"),
        ),
    ),
    Hook(
        name="KV event requests",
        what="vLLM's publisher of KV events accepts short messages only",
        why="The publisher's replay port accepts any message from any client, and logs invalid messages in full",
        until="the publisher limits message sizes",
        replaces=("ZmqEventPublisher._socket_setup",),
        relies_on=(Code(f"{EVENTS}._socket_setup", "self._ctx.socket(zmq.ROUTER)"),),
    ),
)


# ---- start -----------------------------------------------------------------------------------------------------------


ENGINE_UTILS = "vllm.v1.engine.utils"
WORKER_PROCESSES = "vllm.v1.executor.multiproc_executor"
WORKER = "vllm.v1.worker.worker_base:WorkerBase"
WORKER_WRAPPER = "vllm.v1.worker.worker_base:WorkerWrapperBase"
ENGINE_ARGS = "vllm.engine.arg_utils:EngineArgs"

START_HOOKS = (
    Hook(
        name="flags",
        what="vLLM's parsers raise an error for invalid flags",
        why="Their error message follows a list of all of vLLM's flags, of some 300 lines",
        until="vLLM's error message is one line",
        replaces=("FlexibleArgumentParser.error",),
        relies_on=(Takes("vllm.utils.argparse_utils:FlexibleArgumentParser.error", "message"),),
    ),
    Hook(
        name="loading stages",
        what="A worker's methods that load, profile and warm up log a line before they run",
        why="Users who wait for an engine see its stage, and which stage is slow",
        until="vLLM reports the progress of loading",
        overrides=tuple(f"WorkerBase.{method}" for method in OF_WORKERS),
        relies_on=(
            Code(f"{WORKER_WRAPPER}.init_worker", "resolve_obj_by_qualname(", "parallel_config.worker_cls"),
            Takes(f"{WORKER}.__init__", "vllm_config", "rank"),
            Code(f"{WORKER}.__init__", "self.model_config = vllm_config.model_config", "self.rank = rank"),
            Has(WORKER, "init_device", "load_model", "compile_or_warm_up_model"),
        ),
    ),
    Hook(
        name="one import",
        what="On a CPU, core and worker are forked in advance from the process that has imported vLLM, "
        "and models are inspected there; OpenMP's variables, which vLLM sets for its worker, are set from the start",
        why="Three imports of torch and vLLM, one after the other, take most of an engine's start",
        until="vLLM forks its processes from one that has imported it, on CPUs, too",
        replaces=("engine.utils.get_mp_context", "multiproc_executor.get_mp_context", "registry._run_in_subprocess"),
        relies_on=(
            Code(f"{ENGINE_UTILS}:CoreEngineProcManager.__init__", "context = get_mp_context()", "context.Process("),
            Code(
                f"{WORKER_PROCESSES}:WorkerProc.make_worker_process", "context = get_mp_context()", "context.Process("
            ),
            Takes(f"{ENGINE_UTILS}:get_mp_context"),
            Takes(f"{WORKER_PROCESSES}:get_mp_context"),
            Takes(f"{REGISTRY}:_run_in_subprocess", "fn"),
            Code(
                "vllm.platforms.cpu:CpuPlatform.check_and_update_config", '"libgomp" in ld_preload_str', "libgomp*.so*"
            ),
            Code(
                "vllm.utils.ompmultiprocessing:OMPProcessManager.configure_omp_envs",
                'envs_dict["OMP_NUM_THREADS"] = str(len(cpu_list))',
                'envs_dict["GOMP_CPU_AFFINITY"] = cpu_list_str',
            ),
        ),
    ),
    Hook(
        name="first uses",
        what="An engine samples, ranks log probabilities and generates by a grammar before it serves; then its "
        "choice of a grammar's backend is taken back",
        why="The first use of each blocks the API server, core and workers for seconds, as if they were stuck",
        until="vLLM loads and compiles what sampling and structured output need when it starts",
        relies_on=(
            Code(f"{CORE}.__init__", "self.structured_output_manager = "),
            Code(f"{STRUCTURED}.__init__", "self.backend: StructuredOutputBackend | None = None"),
            Code(f"{STRUCTURED}.grammar_init", "if self.backend is None:"),
            Has("vllm.config:StructuredOutputsConfig", "backend"),
        ),
    ),
    Hook(
        name="start checks",
        what="Tercet checks its requirements where vLLM makes an engine's arguments from a server's flags, and where "
        "it makes a config from these",
        why="An engine that cannot serve the verbs reports this before it loads weights",
        until="vLLM calls its plugins before it starts an engine",
        replaces=("EngineArgs.from_cli_args", "EngineArgs.create_engine_config"),
        relies_on=(
            Takes(f"{ENGINE_ARGS}.from_cli_args", "args"),
            Takes(f"{ENGINE_ARGS}.create_engine_config", "usage_context"),
            Code("vllm.engine.arg_utils:AsyncEngineArgs.add_cli_args", "load_general_plugins()"),
        ),
    ),
)

HOOKS = (*ENGINE_HOOKS, *CORE_HOOKS, *START_HOOKS)
