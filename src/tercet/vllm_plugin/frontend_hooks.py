"""The frontend side of the registry: hooks of a router's process, around vLLM's OpenAI layer."""

from __future__ import annotations

from tercet.vllm_plugin.expectations import Has, OneOf, Says, Takes
from tercet.vllm_plugin.hooks import Hook

ASYNC_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
CLIENT = "vllm.v1.engine.core_client:EngineCoreClient"
OUTPUTS = "vllm.v1.engine.output_processor"
LAUNCHERS = "vllm.entrypoints.launchers"
DETOKENIZER = "vllm.v1.engine.detokenizer"
STATS = "vllm.v1.metrics.stats"
RENDERER = "vllm.renderers.base:BaseRenderer"
MEDIA = "vllm.multimodal.media.connector:MediaConnector"
MM_INPUTS = "vllm.multimodal.inputs"
SERIAL = "vllm.v1.serial_utils"
COMPLETIONS = "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion"
CHATS = "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat"
MESSAGES = "vllm.entrypoints.anthropic.serving:AnthropicServingMessages"
SERVING_MODELS = "vllm.entrypoints.openai.models.serving:OpenAIServingModels"
UVICORN = "uvicorn.protocols.http.httptools_impl"

FRONTEND_HOOKS = (
    Hook(
        name="engine-core client",
        what="AsyncLLM is built over a client that runs programs, instead of one engine's client",
        why="vLLM's OpenAI layer serves a fleet as it serves an engine",
        until="AsyncLLM takes its engine-core client as an argument",
        replaces=("EngineCoreClient.make_async_mp_client",),
        relies_on=(
            Takes(f"{CLIENT}.make_async_mp_client"),
            Says(f"{ASYNC_LLM}.__init__", "self.engine_core = EngineCoreClient.make_async_mp_client("),
            Takes(f"{ASYNC_LLM}.__init__", "vllm_config", "executor_class", "log_stats", "log_requests"),
            Says(f"{ASYNC_LLM}._add_request", "add_request(", "await self.engine_core.add_request_async(request)"),
            Says(f"{ASYNC_LLM}._run_output_handler", "await engine_core.get_output_async()"),
            Has(CLIENT, "get_output_async", "add_request_async", "abort_requests_async", "get_supported_tasks_async"),
            Has(CLIENT, "reset_mm_cache_async", "shutdown", "dp_engines_running"),
            Has("vllm.v1.engine:EngineCoreOutputs", "outputs"),
        ),
    ),
    Hook(
        name="prompts one by one",
        what="The generations of one HTTP request begin one after the other",
        why="vLLM prepares all of a request's prompts in one step, in which no other stream gets a token",
        until="its handlers pause between them",
        replaces=("AsyncLLM.generate",),
        relies_on=(Takes(f"{ASYNC_LLM}.generate", "prompt", "sampling_params", "request_id"),),
    ),
    Hook(
        name="adapters",
        what="vLLM's OpenAI layer looks adapters up in a view of those of the fleet",
        why="A client asks for an adapter by the model's name, and no engine of this process loads it",
        until="OpenAIServingModels has a setting for the look-up",
        replaces=("OpenAIServingModels.lora_requests", "InputProcessor.lora_config"),
        relies_on=(
            Says(SERVING_MODELS, "self.lora_requests: dict[str, LoRARequest]", "self.lora_requests.values()"),
            Says("vllm.entrypoints.serve.engine.serving:BaseServing", "self.models.lora_requests[request.model]"),
            Says("vllm.v1.engine.input_processor:InputProcessor._validate_lora", "if not self.lora_config:"),
            Has("vllm.v1.engine:EngineCoreRequest", "lora_request"),
            Takes("vllm.lora.request:LoRARequest", "lora_name", "lora_int_id", "lora_path"),
        ),
    ),
    Hook(
        name="images",
        what="Images that vLLM's processor has made are kept here, and sent to engines with each verb",
        why="vLLM forgets it once an engine has it, and here another engine may be the next to compute it",
        until="a renderer can be configured to keep its results",
        replaces=("BaseRenderer._mm_processor_cache", "ModelConfig.allowed_media_domains", "ModelConfig.dtype"),
        relies_on=(
            Says(f"{RENDERER}.__init__", "self._mm_processor_cache = processor_cache_from_config(config)"),
            Takes("vllm.multimodal.cache:MultiModalProcessorOnlyCache.__init__", "model_config"),
            Says(f"{MEDIA}._assert_url_in_allowed_media_domains", "not in self.allowed_media_domains"),
            Says("vllm.multimodal.processing.context:InputProcessingContext", "dtype=self.model_config.dtype"),
            Has("vllm.v1.engine:EngineCoreRequest", "mm_features"),
            Has(f"{MM_INPUTS}:MultiModalFeatureSpec", "data", "modality", "mm_position"),
            Takes(f"{SERIAL}:MsgpackEncoder.__init__", "size_threshold"),
        ),
    ),
    Hook(
        name="launcher",
        what="The application, its state, its options and its server are made by the functions of vLLM's own command",
        why="Every route, option and middleware of vLLM's API server is there, and stays vLLM's",
        until="these functions are declared stable",
        relies_on=(
            Takes(f"{LAUNCHERS}.app:build_app", "args", "supported_tasks", "model_config"),
            Takes(f"{LAUNCHERS}.api_server.app_state:init_app_state", "engine_client", "state", "args"),
            Takes(f"{LAUNCHERS}.launcher:serve_http", "app", "sock", "enable_ssl_refresh"),
            Says(
                f"{LAUNCHERS}.launcher:serve_http",
                "app.state.server = server",
                "loop.add_signal_handler(",
                "await server_task",
            ),
            Takes(f"{LAUNCHERS}.launcher:setup_server", "args", "reuse_port"),
            Takes(f"{LAUNCHERS}.cli_args:make_arg_parser", "parser"),
            Takes(f"{LAUNCHERS}.cli_args:validate_parsed_serve_args", "args"),
            Takes("vllm.engine.arg_utils:AsyncEngineArgs.create_model_config"),
            OneOf(
                Takes("vllm.engine.arg_utils:AsyncEngineArgs.create_structured_outputs_config"),
                Has("vllm.engine.arg_utils:AsyncEngineArgs", "structured_outputs_config"),
            ),
        ),
    ),
    Hook(
        name="environment",
        what="vLLM's environment variables are read once, and a router needs no KV memory",
        why="vLLM looks up dozens of variables for each request",
        until="vLLM reads its environment once by itself",
        replaces=("envs.VLLM_CPU_KVCACHE_SPACE",),
        relies_on=(
            Takes("vllm.envs:enable_envs_cache"),
            Says("vllm.envs:__getattr__", "environment_variables[name]()"),
        ),
    ),
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
        name="converted streams",
        what="An error in the chat stream that Anthropic's events are made from ends them with its message",
        why="vLLM reports instead that it could not convert it, in pydantic's words",
        until="vLLM converts errors, too",
        replaces=("AnthropicServingMessages.chat_completion_stream_generator",),
        relies_on=(
            Says(f"{MESSAGES}.message_stream_converter", 'item.startswith("data:")', "Invalid data format received"),
            Takes(f"{CHATS}.chat_completion_stream_generator", "request"),
            Says(CHATS, "return self.chat_completion_stream_generator("),
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
        name="long texts",
        what="A renderer refuses texts and tokens that are longer than any prompt of its model",
        why="/tokenize and its like accept any length, and continue when their client has left",
        until="these routes have a limit",
        replaces=(
            "BaseRenderer._tokenize_prompt",
            "BaseRenderer._tokenize_prompt_async",
            "BaseRenderer._detokenize_prompt",
            "BaseRenderer._detokenize_prompt_async",
        ),
        relies_on=(
            Takes(f"{RENDERER}._detokenize_prompt", "prompt"),
            Takes(f"{RENDERER}._detokenize_prompt_async", "prompt"),
            Says(f"{RENDERER}._tokenize_singleton_prompt", "self._tokenize_prompt(", "self._detokenize_prompt("),
            Says(
                f"{RENDERER}._tokenize_singleton_prompt_async",
                "self._tokenize_prompt_async(",
                "self._detokenize_prompt_async(",
            ),
        ),
    ),
    Hook(
        name="connections",
        what="uvicorn's protocol puts a request's connection into its scope, and chunks are written to it",
        why="A token goes to the socket without the layers of the application",
        until="uvicorn hands the connection to the application",
        replaces=("HttpToolsProtocol._start_asgi_task", "HttpToolsProtocol.connection_lost"),
        relies_on=(
            Takes(f"{UVICORN}:HttpToolsProtocol._start_asgi_task", "cycle", "app"),
            Takes(f"{UVICORN}:HttpToolsProtocol.connection_lost", "exc"),
            Says(f"{UVICORN}:RequestResponseCycle.__init__", "self.transport", "self.flow", "self.disconnected"),
            Says(f"{UVICORN}:RequestResponseCycle.__init__", "self.scope", "self.chunked_encoding"),
        ),
    ),
    Hook(
        name="limits of connections",
        what="uvicorn's protocol reports when a head or a body ends, and is not fed beyond the limits",
        why="Heads have no limit of size or time there, bodies none of time, and silent connections stay",
        until="uvicorn limits them",
        replaces=(
            "HttpToolsProtocol.connection_made",
            "HttpToolsProtocol.data_received",
            "HttpToolsProtocol.handle_websocket_upgrade",
            "HttpToolsProtocol.on_message_begin",
            "HttpToolsProtocol.on_headers_complete",
            "HttpToolsProtocol.on_body",
            "HttpToolsProtocol.on_message_complete",
            "HttpToolsProtocol.on_response_complete",
        ),
        relies_on=(
            Says(f"{UVICORN}:HttpToolsProtocol.__init__", "httptools.HttpRequestParser(self)"),
            Says(f"{UVICORN}:HttpToolsProtocol.data_received", "self.parser.feed_data(data)"),
            Says(f"{UVICORN}:HttpToolsProtocol.on_message_begin", "self.url", "self.headers"),
            Says(f"{UVICORN}:HttpToolsProtocol.on_headers_complete", "self.cycle", "on_response_complete"),
            Says(f"{UVICORN}:RequestResponseCycle.receive", "self.disconnected", "self.message_event"),
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
