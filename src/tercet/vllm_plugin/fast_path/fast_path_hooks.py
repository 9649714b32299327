"""The fast path's side of the registry: a router that is started with ``--fast-path off`` needs none of these."""

from __future__ import annotations

from tercet.vllm_plugin.expectations import Has, Says, Takes
from tercet.vllm_plugin.hooks import Hook

ASYNC_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
OUTPUTS = "vllm.v1.engine.output_processor"
DETOKENIZER = "vllm.v1.engine.detokenizer"
STATS = "vllm.v1.metrics.stats"
RENDERER = "vllm.renderers.base:BaseRenderer"
COMPLETIONS = "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion"
CHATS = "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat"

FAST_PATH_HOOKS = (
    Hook(
        name="plain streams",
        what="Copies of vLLM's serving objects prepare a plain stream, up to where they would generate and write it",
        why="Its chunks differ only in their text, and need none of the objects, queues and tasks between",
        until="vLLM has a call that renders and checks a request without serving it, and its own chunks cost as little",
        replaces=(
            "OpenAIServingCompletion.engine_client",
            "OpenAIServingCompletion.completion_stream_generator",
            "OpenAIServingChat.engine_client",
            "OpenAIServingChat.chat_completion_stream_generator",
        ),
        relies_on=(
            Takes(f"{ASYNC_LLM}.generate", "prompt", "sampling_params", "request_id"),
            Takes(f"{ASYNC_LLM}.add_request", "request_id", "prompt", "params"),
            Says(
                COMPLETIONS,
                "async def create_completion(",
                "self.engine_client.generate(",
                "return self.completion_stream_generator(",
            ),
            Takes(f"{COMPLETIONS}.completion_stream_generator", "request", "engine_inputs", "result_generator"),
            Takes(f"{COMPLETIONS}.completion_stream_generator", "request_id", "created_time", "model_name"),
            Says(
                CHATS,
                "async def create_chat_completion(",
                "self.engine_client.generate(",
                "return self.chat_completion_stream_generator(",
            ),
            Takes(f"{CHATS}.chat_completion_stream_generator", "request", "result_generator"),
            Takes(f"{CHATS}.chat_completion_stream_generator", "request_id", "model_name"),
            Takes(f"{CHATS}.get_chat_request_role", "request"),
            Has(COMPLETIONS, "create_streaming_error_response", "_raise_if_error"),
            Has(COMPLETIONS, "_convert_generation_error_to_streaming_response"),
            Says(COMPLETIONS, "self.enable_prompt_tokens_details", "self.system_fingerprint"),
            Says(CHATS, "self.enable_prompt_tokens_details", "self.system_fingerprint"),
        ),
    ),
    Hook(
        name="chunks of streams",
        what="Chunks of plain streams are written with the fields that vLLM's stream generators set",
        why="Making an object of each chunk costs more than all other work for a token",
        until="vLLM's own chunks cost as little",
        relies_on=(
            Says(
                COMPLETIONS,
                "prompt_token_ids=prompt_token_ids_to_return",
                "chunk.model_dump_json(exclude_unset=True)",
                "exclude_unset=False, exclude_none=True",
            ),
            Says(
                CHATS,
                "finish_reason=finish_reason_",
                "stop_reason=output.stop_reason",
                "chunk.model_dump_json(exclude_unset=True)",
                "exclude_unset=True, exclude_none=True",
            ),
        ),
    ),
    Hook(
        name="output processor",
        what="Outputs are passed to OutputProcessor in the stream's own task, and its records are read",
        why="vLLM writes the chunks that only it can write, and updates its counters",
        until="AsyncLLM has a call that processes one request's outputs",
        relies_on=(
            Takes(f"{OUTPUTS}:OutputProcessor.process_outputs", "engine_core_outputs", "iteration_stats"),
            Takes(f"{OUTPUTS}:OutputProcessor.abort_requests", "request_ids", "internal"),
            Says(f"{OUTPUTS}:OutputProcessor.__init__", "self.request_states"),
            Says(f"{OUTPUTS}:RequestState.__init__", "self.prompt_token_ids", "self.detokenizer", "self.queue"),
            Says(f"{OUTPUTS}:RequestState.__init__", "self.stats", "self.stream_interval"),
            Has(f"{OUTPUTS}:RequestOutputCollector", "put", "get_nowait", "close"),
        ),
    ),
    Hook(
        name="detokenizer",
        what="The text of tokens that are whole characters is looked up instead of decoded",
        why="A byte-level vocabulary's text needs no decoding, and streams are mostly such tokens",
        until="vLLM's detokenizer caches them",
        replaces=("FastIncrementalDetokenizer.decode_next",),
        relies_on=(
            Takes(f"{DETOKENIZER}:FastIncrementalDetokenizer.decode_next", "next_token_id"),
            Says(f"{DETOKENIZER}:FastIncrementalDetokenizer.__init__", "self.spaces_between_special_tokens"),
            Says(f"{DETOKENIZER}:BaseIncrementalDetokenizer.update", "self.output_text += self.decode_next("),
            Says(f"{DETOKENIZER}:BaseIncrementalDetokenizer.__init__", "self.stop"),
            Takes(f"{DETOKENIZER}:BaseIncrementalDetokenizer.get_next_output_text", "finished", "delta"),
        ),
    ),
    Hook(
        name="token statistics",
        what="Tokens that vLLM's own path did not see are added to its iteration statistics",
        why="vLLM's metrics count every token that a client got",
        until="the loggers accept counts of tokens",
        relies_on=(
            Says(
                f"{STATS}:IterationStats.update_from_output",
                "self.num_generation_tokens +=",
                "req_stats.num_generation_tokens +=",
                "req_stats.last_token_ts",
                "self.inter_token_latencies_iter.append(",
            ),
            Has(f"{STATS}:RequestStateStats", "num_generation_tokens", "last_token_ts"),
            Says(f"{ASYNC_LLM}.__init__", "self.logger_manager"),
        ),
    ),
    Hook(
        name="short prompts",
        what="Short prompts are tokenised on the event loop, by the tokenizer that transformers has inside",
        why="A thread and a task for each prompt cost more than tokenising a short one",
        until="the renderer has a limit below which it stays on the event loop",
        replaces=(
            "BaseRenderer._tokenize_prompt",
            "BaseRenderer._tokenize_prompt_async",
            "BaseRenderer.render_cmpl_async",
        ),
        relies_on=(
            Takes(f"{RENDERER}._tokenize_prompt", "prompt", "params"),
            Says(f"{RENDERER}.__init__", "self._tokenize_prompt_async"),
            Takes(f"{RENDERER}.render_cmpl", "prompts"),
            Takes(f"{RENDERER}.render_cmpl_async", "prompts"),
            Says(
                "vllm.renderers.params:TokenizeParams.get_encode_kwargs",
                "truncation=max_length is not None",
                "max_length=max_length",
                "add_special_tokens=self.add_special_tokens",
            ),
            Takes("transformers:TokenizersBackend"),
        ),
    ),
    Hook(
        name="HTTP metrics",
        what="Requests that bypassed vLLM's metrics middleware are added to its metrics",
        why="http_requests_total and its like count every request",
        until="the middleware has a call for it",
        relies_on=(
            Says("prometheus_fastapi_instrumentator.middleware:PrometheusInstrumentatorMiddleware", "instrumentations"),
            Takes("prometheus_fastapi_instrumentator.metrics:Info", "request", "response", "modified_handler"),
        ),
    ),
)
