"""The engine side of the registry: hooks of a vLLM server, outside of its core's scheduling and blocks."""

from __future__ import annotations

from tercet.vllm_plugin.expectations import Has, Says, Takes
from tercet.vllm_plugin.hooks import Hook

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
REQUEST = "vllm.v1.request:Request"
CORE = "vllm.v1.engine.core:EngineCore"
ASYNC_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
INPUTS = "vllm.v1.engine.input_processor"
OUTPUTS = "vllm.v1.engine.output_processor"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
BATCH = "vllm.v1.worker.gpu_input_batch"
QUEUE = "vllm.distributed.device_communicators.shm_broadcast"
LAUNCHER = "vllm.entrypoints.launchers.launcher"
RENDERER = "vllm.renderers.base:BaseRenderer"
REGISTRY = "vllm.model_executor.models.registry"
SERVING_MODELS = "vllm.entrypoints.openai.models.serving:OpenAIServingModels"
LORA_OPS = "vllm.lora.ops.torch_ops.lora_ops"
CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn"

PASSES_IMAGE_NAMES = (
    Says(f"{RENDERER}._process_multimodal", "mm_uuid_items = self._process_mm_uuids("),
    Says(f"{RENDERER}._process_mm_uuids", "return mm_uuid_items"),
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
            Has(f"{CONNECTOR}:KVConnectorBase_V1", "register_kv_caches", "get_handshake_metadata", "wait_for_save"),
            Has(f"{CONNECTOR}:KVConnectorBase_V1", "bind_connector_metadata"),
            Has(f"{CONNECTOR}:KVConnectorBase_V1", "on_new_request", "request_finished", "shutdown"),
            Has(f"{CONNECTOR}:KVConnectorBase_V1", "requires_piecewise_for_cudagraph"),
            Has(f"{CONNECTOR}:SupportsHMA", "request_finished_all_groups"),
            Takes(f"{CONNECTOR}:KVConnectorBase_V1.save_kv_layer", "layer_name", "kv_layer", "attn_metadata"),
            Takes(f"{CONNECTOR}:KVConnectorBase_V1.build_connector_meta", "scheduler_output"),
            Says(f"{SCHEDULER}.schedule", "self._build_kv_connector_meta(", "self._update_after_schedule("),
            Says(f"{SCHEDULER}.add_request", "self.connector.on_new_request(request)"),
            Takes(f"{SCHEDULER}.get_kv_connector"),
            Says(f"{REQUEST}.__init__", 'sampling_params.extra_args.get("kv_transfer_params")'),
            Says("vllm.config.parallel:ParallelConfig", "_api_process_count: int"),
            Has("vllm.config.parallel:ParallelConfig", "use_ubatching"),
            Says("vllm.config.parallel:ParallelConfig", "data_parallel_external_lb: bool"),
            Says("vllm.config:ModelConfig.__post_init__", "self.runner_type = "),
        ),
    ),
    Hook(
        name="pipeline stages",
        what="Workers exchange the names of their layers, and the core gets each worker's description by stage",
        why="A worker's KV cache config has only its own layers, but sending KV between stages needs all layers",
        until="a KV connector gets all stages' layers",
        relies_on=(
            Takes(f"{CONNECTOR}:KVConnectorBase_V1.set_xfer_handshake_metadata_pp_aware", "metadata"),
            Says(CORE, "set_xfer_handshake_metadata_pp_aware(content)"),
            Takes("vllm.distributed.parallel_state:get_pp_group"),
            Says("vllm.distributed.parallel_state:GroupCoordinator", "cpu_group: ProcessGroup", "rank_in_group"),
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
            Says("vllm.plugins.endpoint_plugins.interface:init_endpoint_plugins_state", ".init_state("),
            Says("vllm.v1.metrics.prometheus:get_prometheus_registry", "return REGISTRY"),
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
            Says(f"{RUNNER}._update_states", "output_token_ids=[]", "self.input_batch.add_request("),
            Takes(f"{BATCH}:InputBatch.add_request", "request"),
            Says(f"{BATCH}:InputBatch.add_request", "request.output_token_ids"),
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
            Says(f"{RUNNER}._bookkeeping_sync", "discard", "self.input_batch.generators", "set_offset("),
            Says(f"{RUNNER}.__init__", "self.discard_request_mask"),
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
            Says(f"{QUEUE}:SpinCondition.wait", "self.last_read + self.busy_loop_s", "self.poller.poll("),
            Says(f"{QUEUE}:SpinCondition.__init__", "zmq.CONFLATE"),
        ),
    ),
    Hook(
        name="load",
        what="The API server's process listens to the statistics that come with each step's outputs",
        why="Load is reported with each step, without a call to the engine's core",
        until="AsyncLLM passes its scheduler's statistics to plugins",
        replaces=("OutputProcessor.update_scheduler_stats",),
        relies_on=(
            Takes(f"{OUTPUTS}:OutputProcessor.update_scheduler_stats", "scheduler_stats"),
            Says(f"{ASYNC_LLM}._run_output_handler", "output_processor.update_scheduler_stats("),
            Takes(f"{OUTPUTS}:OutputProcessor.get_num_unfinished_requests"),
            Takes(f"{OUTPUTS}:OutputProcessor.get_num_queued_tokens"),
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
            Says(f"{ASYNC_LLM}.add_request", "RequestOutputCollector(", "return queue"),
            Takes(f"{OUTPUTS}:RequestOutputCollector.put", "output"),
            Says(f"{OUTPUTS}:RequestOutputCollector.__init__", "self.output"),
            Says(f"{OUTPUTS}:OutputProcessor.process_outputs", "req_state.queue.put("),
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
            Says(
                f"{ASYNC_LLM}._add_request",
                "self.output_processor.add_request(",
                "await self.engine_core.add_request_async(request)",
            ),
            Says(
                f"{ASYNC_LLM}.add_request",
                "await self.engine_core.add_request_async(child_request)",
                "await self.abort(",
            ),
            Takes("vllm.v1.engine.core_client:AsyncMPClient.add_request_async", "request"),
            Takes(f"{OUTPUTS}:OutputProcessor.abort_requests", "request_ids", "internal"),
            Says(f"{OUTPUTS}:OutputProcessor.__init__", "self.request_states"),
            Says(
                f"{OUTPUTS}:OutputProcessor.process_outputs",
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
            Says(SERVING_MODELS, "self.lora_requests: dict[str, LoRARequest]"),
            Takes(f"{SERVING_MODELS}.load_lora_adapter", "request"),
            Says(f"{SERVING_MODELS}.load_lora_adapter", "load_inplace=request.load_inplace"),
            Says(f"{SERVING_MODELS}.__init__", "self.lora_id_counter = AtomicCounter(0)"),
            Says(f"{OUTPUTS}:OutputProcessor.__init__", "self.request_states: dict[str, RequestState]"),
            Says(f"{OUTPUTS}:RequestState.__init__", "self.lora_name = "),
            Takes("vllm.lora.request:LoRARequest", "load_inplace"),
            Takes(f"{SERVING_MODELS}.unload_lora_adapter", "request"),
            Says(f"{SERVING_MODELS}.load_lora_adapter", "await self.engine_client.add_lora(lora_request)"),
            Says(f"{SERVING_MODELS}.resolve_lora", "await self.engine_client.add_lora(lora_request)"),
            Takes(f"{ASYNC_LLM}.add_lora", "lora_request"),
            Takes("vllm.lora.request:LoRARequest", "lora_name", "lora_int_id", "lora_path", "is_3d_lora_weight"),
            Takes("vllm.lora.utils:get_adapter_absolute_path", "lora_path"),
            Takes(f"{REQUEST}.__init__", "lora_request"),
            Takes(f"{ASYNC_LLM}.add_request", "lora_request"),
            Says(
                "vllm.v1.core.kv_cache_utils:_gen_lora_extra_hash_keys",
                "lora_request.lora_name",
                "lora_request.lora_path",
            ),
            Says(f"{OUTPUTS}:OutputProcessor.__init__", "self.lora_states = LoRARequestStates("),
            Says("vllm.v1.metrics.stats:LoRAStats.__init__", "self.waiting", "self.running"),
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
            Says(f"{INPUTS}:InputProcessor.process_inputs", 'decoder_input["mm_hashes"]', "mm_hash=base_mm_hash"),
            Says(f"{INPUTS}:InputProcessor._get_mm_identifier", "enable_tower_connector_lora"),
            Says("vllm.v1.core.kv_cache_utils:_gen_mm_extra_hash_keys", "mm_feature.identifier"),
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
        replaces=(
            "lora_ops.bgmv_shrink",
            "punica_cpu.bgmv_shrink",
            "lora_ops.bgmv_expand",
            "punica_cpu.bgmv_expand",
        ),
        relies_on=(
            Takes(f"{LORA_OPS}:bgmv_shrink", "inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor"),
            Says(f"{LORA_OPS}:sgmv_shrink", "bgmv_shrink(inputs, lora_a_weights, output_tensor, exploded_indices"),
            Takes(f"{LORA_OPS}:bgmv_expand", "inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor"),
            Says(f"{LORA_OPS}:sgmv_expand", "bgmv_expand(inputs, lora_b_weights, output_tensor, exploded_indices"),
            Says("vllm.lora.punica_wrapper.utils:convert_mapping", "if index_mapping_indices[i] > 0", "else -1"),
        ),
    ),
    Hook(
        name="SIGTERM",
        what="The API server's handler of SIGTERM is replaced as its server starts up; vLLM's own runs, by SIGINT, "
        "when the engine is empty",
        why="Running sequences continue on other engines before this one stops",
        until="vLLM calls its plugins before it stops",
        relies_on=(
            Says(
                f"{LAUNCHER}:serve_http",
                "loop.create_task(server.serve(",
                "loop.add_signal_handler(signal.SIGINT, signal_handler)",
                "loop.add_signal_handler(signal.SIGTERM, signal_handler)",
                "await server_task",
            ),
            Takes(f"{LAUNCHER}:NoSignalServer.capture_signals"),
            Says(f"{LAUNCHER}:terminate_if_errored", "engine.errored"),
            Says("vllm.entrypoints.launchers.app:build_app", "lifespan=lifespan"),
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
