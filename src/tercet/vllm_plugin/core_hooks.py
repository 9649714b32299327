"""The registry's part for an engine's core: hooks of its scheduler, its requests and its KV blocks."""

from __future__ import annotations

from tercet.vllm_plugin.expectations import Has, OneOf, Says, Takes
from tercet.vllm_plugin.hooks import Hook

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
SINGLE = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"
POOL = "vllm.v1.core.block_pool:BlockPool"
REQUEST = "vllm.v1.request:Request"
CORE = "vllm.v1.engine.core:EngineCore"
EXECUTOR = "vllm.v1.executor.abstract:Executor"
OUTPUTS = "vllm.v1.engine.output_processor"
STRUCTURED = "vllm.v1.structured_output:StructuredOutputManager"

CORE_HOOKS = (
    Hook(
        name="core methods",
        what="EngineCore gets methods that the API server calls as utility calls, on the core's thread",
        why="Blocks are reserved and given back between two engine steps, so nothing races with scheduling",
        until="a KV connector may serve its own calls",
        replaces=("EngineCore.tercet_*",),
        relies_on=(
            Says("vllm.v1.engine.core:EngineCoreProc._handle_client_request", "getattr(self, method_name)"),
            Takes("vllm.v1.engine.core_client:AsyncMPClient.call_utility_async", "method"),
            Says(f"{CORE}.__init__", "self.request_block_hasher"),
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
            Says(f"{SINGLE}.__init__", "self.req_to_blocks", "self.num_cached_block"),
            Says(f"{SINGLE}.cache_blocks", "reachable_boundaries.append(request.shared_prefix_boundary)"),
            Takes(f"{SINGLE}.get_num_skipped_tokens", "num_computed_tokens"),
            Takes(f"{POOL}.get_cached_block", "block_hash", "kv_cache_group_ids"),
            Has("vllm.v1.kv_cache_interface:KVCacheSpecKind", "FULL_ATTENTION", "MLA_ATTENTION", "SLIDING_WINDOW"),
            Takes("vllm.v1.kv_cache_interface:get_kv_cache_spec_kind", "kv_cache_spec"),
            Takes("vllm.v1.kv_cache_interface:get_kv_cache_spec_sliding_window", "kv_cache_spec"),
            Takes(f"{SCHEDULER}._inflight_prefill_reserved_blocks"),
            Says(f"{SCHEDULER}.schedule", "request_queue = self.kv_holding_waiting"),
            Takes(f"{SCHEDULER}._holds_kv_blocks"),
            Says(f"{SCHEDULER}.__init__", "self.kv_holding_waiting", "self.needs_kv_cache_zeroing"),
            # Blocks become free once no running step writes into them: peers do not wait for streams.
            Says(f"{SCHEDULER}.__init__", "kv_transfer_config.is_kv_consumer", "self.defer_block_free = True"),
            Says(f"{SCHEDULER}._free_request_blocks", "self.deferred_frees.append("),
            Says(f"{SCHEDULER}.__init__", "self.num_spec_tokens", "self.num_lookahead_tokens"),
            Takes("vllm.v1.core.sched.request_queue:RequestQueue.remove_request", "request"),
        ),
    ),
    Hook(
        name="order of reservations",
        what="A reservation waits, unanswered, for its turn among vLLM's waiting requests, and holds later ones back",
        why="Neither may keep the other waiting for blocks for ever",
        until="KVCacheManager can reserve blocks in the order of admission",
        relies_on=(
            Says("vllm.v1.engine.core:EngineCoreProc._invoke_utility_method", "isinstance(result, Future)"),
            Says(f"{SCHEDULER}.schedule", "get_num_new_matched_tokens(", "if ext_tokens is None:"),
            Takes(f"{SCHEDULER}._request_remaining_blocks", "request"),
            Takes(f"{SCHEDULER}._free_request_blocks", "request"),
            Takes("vllm.v1.core.sched.request_queue:RequestQueue.prepend_request", "request"),
            Says(f"{SCHEDULER}.__init__", "self.policy", "self.waiting"),
            Says(f"{REQUEST}.__init__", "self.arrival_time"),
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
            Says(f"{REQUEST}.__init__", "self.num_in_flight_tokens"),
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
            Says(f"{POOL}.get_new_blocks", "self.free_block_queue.popleft_n(num_blocks)"),
            Says(f"{SINGLE}.__init__", "self.block_pool = block_pool", "self.req_to_blocks"),
            Takes(f"{CONNECTOR}:KVConnectorBase_V1.take_events"),
            Says(f"{SCHEDULER}.update_from_output", "self.connector.take_events()", "return engine_core_outputs"),
            Says(f"{SCHEDULER}.__init__", "self.max_num_running_reqs", "self.max_model_len"),
            Says(f"{SCHEDULER}._preempt_request", "request.num_computed_tokens = 0", "request.num_preemptions += 1"),
            Says(f"{REQUEST}.__init__", "self.num_in_flight_tokens", "self.num_computed_tokens"),
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
            Says(f"{REQUEST}.__init__", "self.structured_output_request", "self.prefill_stats"),
            Takes("vllm.v1.metrics.stats:PrefillStats.set"),
            Says("vllm.v1.structured_output.request:StructuredOutputRequest", "self._grammar = self._grammar.result()"),
            Takes("vllm.v1.structured_output.backend_types:StructuredOutputGrammar.accept_tokens", "request_id"),
            Takes(f"{STRUCTURED}.accept_tokens", "request", "new_token_ids"),
            Says(f"{STRUCTURED}.accept_tokens", "spec_tokens_committed=True", "structured_req.reasoning_ended = True"),
            Says(f"{SCHEDULER}.__init__", "self.structured_output_manager"),
        ),
    ),
    Hook(
        name="sequences",
        what="The scheduler's requests are read, and identified by the beginning of their ids",
        why="An engine reports what it generates, with the blocks that each sequence holds",
        until="vLLM reports its requests one by one",
        relies_on=(
            Says(f"{SCHEDULER}.__init__", "self.requests: dict[str, Request]"),
            Takes(f"{MANAGER}.get_blocks", "request_id"),
            Has("vllm.v1.request:RequestStatus", "RUNNING"),
            Says(
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
            Says("vllm.distributed.kv_events:ZmqEventPublisher", "self._replay", "self._pub"),
            Takes("vllm.distributed.kv_events:ZmqEventPublisher.publish", "events"),
            Says(f"{SCHEDULER}.__init__", "self.kv_event_publisher"),
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
            Says(
                f"{STRUCTURED}.grammar_init",
                "if self.backend is None:",
                "if self._use_async_grammar_compilation:",
                "self.executor.submit",
                "request.structured_output_request.grammar = ",
            ),
            Says(f"{STRUCTURED}.grammar_init", "structured_outputs._backend"),
            Takes(f"{STRUCTURED}._create_grammar", "request"),
            Says(f"{STRUCTURED}._create_grammar", "struct_request.structured_output_key", "compile_grammar("),
            Takes(f"{EXECUTOR}.__init__", "vllm_config"),
            Says(f"{CORE}.__init__", "load_general_plugins()", "executor_class(vllm_config)"),
            Says(f"{SCHEDULER}.update_from_output", "accept_tokens(", "RequestStatus.FINISHED_ERROR"),
            Says(
                f"{SCHEDULER}.update_from_output", "stop_reason=request.stop_reason", "self.grammar_compile_error_reqs"
            ),
            Says(f"{SCHEDULER}.__init__", "self.requests: dict[str, Request]", "self.grammar_compile_error_reqs"),
            Has("vllm.v1.engine:EngineCoreOutput", "request_id", "finish_reason", "stop_reason"),
            Takes(f"{OUTPUTS}:OutputProcessor.process_outputs", "engine_core_outputs"),
            Says(
                f"{OUTPUTS}:OutputProcessor.process_outputs", "engine_core_output.stop_reason", "req_state.queue.put("
            ),
            Says(f"{OUTPUTS}:RequestOutputCollector.put", "isinstance(output, Exception)", "elif isinstance("),
            Takes("vllm.v1.structured_output.backend_types:StructuredOutputBackend.allocate_token_bitmask"),
            Takes("vllm.v1.structured_output.backend_types:StructuredOutputGrammar.fill_bitmask", "bitmask"),
            Takes("vllm.v1.structured_output.backend_types:StructuredOutputGrammar.accept_tokens", "request_id"),
        ),
    ),
    Hook(
        name="KV event requests",
        what="vLLM's publisher of KV events accepts short messages only",
        why="The publisher's replay port accepts any message from any client, and logs invalid messages in full",
        until="the publisher limits message sizes",
        replaces=("ZmqEventPublisher._socket_setup",),
        relies_on=(
            Says(
                "vllm.distributed.kv_events:ZmqEventPublisher._socket_setup",
                "self._ctx.socket(zmq.ROUTER)",
            ),
        ),
    ),
)
