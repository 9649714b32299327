"""The frontend side of the registry: hooks of a router's process, around vLLM's OpenAI layer."""

from __future__ import annotations

from tercet.vllm_plugin.differences import CLI_ARGS, FORMER_CLI_ARGS
from tercet.vllm_plugin.engine_hooks import PASSES_IMAGE_NAMES
from tercet.vllm_plugin.hooks import Code, Has, Hook, OneOf, Takes

ASYNC_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
CLIENT = "vllm.v1.engine.core_client:EngineCoreClient"
LAUNCHERS = "vllm.entrypoints.launchers"
RENDERER = "vllm.renderers.base:BaseRenderer"
RENDERERS = "vllm.renderers.registry:RendererRegistry"
MEDIA = "vllm.multimodal.media.connector:MediaConnector"
MM_INPUTS = "vllm.multimodal.inputs"
SERIAL = "vllm.v1.serial_utils"
CHATS = "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat"
MESSAGES = "vllm.entrypoints.anthropic.serving:AnthropicServingMessages"
SERVING_MODELS = "vllm.entrypoints.openai.models.serving:OpenAIServingModels"
UVICORN = "uvicorn.protocols.http.httptools_impl"

HOOKS = (
    Hook(
        name="engine-core client",
        what="AsyncLLM is built over a client that runs programs, instead of one engine's client",
        why="vLLM's OpenAI layer serves a fleet as it serves an engine",
        until="AsyncLLM takes its engine-core client as an argument",
        replaces=("EngineCoreClient.make_async_mp_client",),
        relies_on=(
            Takes(f"{CLIENT}.make_async_mp_client"),
            Code(f"{ASYNC_LLM}.__init__", "self.engine_core = EngineCoreClient.make_async_mp_client("),
            Takes(f"{ASYNC_LLM}.__init__", "vllm_config", "executor_class", "log_stats", "log_requests"),
            Code(f"{ASYNC_LLM}._add_request", "add_request(", "await self.engine_core.add_request_async(request)"),
            Code(f"{ASYNC_LLM}._run_output_handler", "await engine_core.get_output_async()"),
            Has(CLIENT, "get_output_async", "add_request_async", "abort_requests_async", "get_supported_tasks_async"),
            Has(CLIENT, "reset_mm_cache_async", "shutdown", "dp_engines_running"),
            Has("vllm.v1.engine:EngineCoreOutputs", "outputs"),
        ),
    ),
    Hook(
        name="prompts one by one",
        what="The generations of one HTTP request begin one after the other",
        why="vLLM prepares all prompts of a request in one pass of the event loop, and other streams get no token",
        until="vLLM's handlers pause between prompts",
        overrides=("AsyncLLM.generate",),
        relies_on=(Takes(f"{ASYNC_LLM}.generate", "prompt", "sampling_params", "request_id"),),
    ),
    Hook(
        name="adapters",
        what="vLLM's OpenAI layer looks adapters up in a view of the fleet's adapters",
        why="Clients name an adapter as the model, and this process has no engine that loads adapters",
        until="OpenAIServingModels has a setting for the look-up",
        replaces=("OpenAIServingModels.lora_requests", "InputProcessor.lora_config"),
        relies_on=(
            Code(SERVING_MODELS, "self.lora_requests: dict[str, LoRARequest]", "self.lora_requests.values()"),
            Code("vllm.entrypoints.serve.engine.serving:BaseServing", "self.models.lora_requests[request.model]"),
            Code("vllm.v1.engine.input_processor:InputProcessor._validate_lora", "if not self.lora_config:"),
            Has("vllm.v1.engine:EngineCoreRequest", "lora_request", "session_id"),
            Takes("vllm.lora.request:LoRARequest", "lora_name", "lora_int_id", "lora_path"),
        ),
    ),
    Hook(
        name="images",
        what="Image tensors that vLLM's processor has made are kept here, and sent to engines with each verb",
        why="vLLM drops them once an engine has them, but here another engine may need them next",
        until="a renderer can be configured to keep its results",
        replaces=("ModelConfig.dtype",),
        overrides=("BaseRenderer.__init__", "BaseRenderer._process_mm_uuids"),
        relies_on=(
            Code(f"{RENDERERS}.load_renderer_cls", "self.renderers[renderer_mode]", "resolve_obj_by_qualname("),
            Takes(f"{RENDERER}.__init__", "config", "tokenizer"),
            Code(f"{RENDERER}.__init__", "self._mm_processor_cache = processor_cache_from_config(config)"),
            Takes("vllm.multimodal.cache:MultiModalProcessorOnlyCache.__init__", "model_config"),
            Code(f"{MEDIA}._assert_url_in_allowed_media_domains", "not in self.allowed_media_domains"),
            Code("vllm.multimodal.processing.context:InputProcessingContext", "dtype=self.model_config.dtype"),
            Has("vllm.v1.engine:EngineCoreRequest", "mm_features"),
            Has(f"{MM_INPUTS}:MultiModalFeatureSpec", "data", "modality", "mm_position"),
            Takes(f"{SERIAL}:MsgpackEncoder.__init__", "size_threshold"),
            *PASSES_IMAGE_NAMES,
        ),
    ),
    Hook(
        name="launcher",
        what="The functions of vLLM's own command make the application, its state, its options and its server",
        why="The router has every route, option and middleware of vLLM's API server, and vLLM maintains them",
        until="these functions are declared stable",
        relies_on=(
            Takes(f"{LAUNCHERS}.app:build_app", "args", "supported_tasks", "model_config"),
            Takes(f"{LAUNCHERS}.api_server.app_state:init_app_state", "engine_client", "state", "args"),
            Takes(f"{LAUNCHERS}.launcher:serve_http", "app", "sock", "enable_ssl_refresh"),
            Code(f"{LAUNCHERS}.launcher:serve_http", "app.state.server = server", "loop.add_signal_handler(",
                 "await server_task"),
            Takes(f"{LAUNCHERS}.launcher:setup_server", "args", "reuse_port"),
            OneOf(
                Takes(f"{CLI_ARGS}:validate_parsed_serve_args", "args"),
                Takes(f"{FORMER_CLI_ARGS}:validate_parsed_serve_args", "args"),
            ),
            OneOf(
                Takes(f"{CLI_ARGS}:make_arg_parser", "parser"),
                Takes(f"{FORMER_CLI_ARGS}:make_arg_parser", "parser"),
            ),
            Takes("vllm.engine.arg_utils:AsyncEngineArgs.create_model_config"),
            OneOf(
                Takes("vllm.engine.arg_utils:AsyncEngineArgs.create_structured_outputs_config"),
                Has("vllm.engine.arg_utils:AsyncEngineArgs", "structured_outputs_config"),
            ),
        ),
    ),
    Hook(
        name="environment",
        what="vLLM's environment variables are read once",
        why="vLLM looks up dozens of variables for each request",
        until="vLLM reads its environment once by itself",
        relies_on=(
            Takes("vllm.envs:enable_envs_cache"),
            Code("vllm.envs:__getattr__", "environment_variables[name]()"),
        ),
    ),
    Hook(
        name="converted streams",
        what="If a chat stream from which Anthropic's events are made has an error, the events end with its message",
        why="vLLM passes on the error's message but not its status, and up to 0.32 neither of them",
        until="vLLM's error event has the status",
        copies=(
            "AnthropicServingMessages.chat_completion_stream_generator_raw",
            "AnthropicServingMessages.chat_completion_stream_generator",
        ),
        relies_on=(
            OneOf(
                Code(MESSAGES, "self.message_stream_converter(self.chat_completion_stream_generator_raw(",
                     "isinstance(origin_chunk, ErrorResponse)"),
                Code(f"{MESSAGES}.message_stream_converter", 'item.startswith("data:")',
                     "Invalid data format received"),
            ),
            Takes(f"{CHATS}.chat_completion_stream_generator", "request"),
            Code(CHATS, "return self.chat_completion_stream_generator("),
        ),
    ),
    Hook(
        name="long texts",
        what="A renderer refuses texts and tokens that are longer than any prompt of its model",
        why="Routes such as /tokenize accept any length, and continue after their client has left",
        until="these routes have a limit",
        overrides=(
            "BaseRenderer.__init__", "BaseRenderer._tokenize_prompt", "BaseRenderer._detokenize_prompt",
            "BaseRenderer._detokenize_prompt_async",
        ),
        relies_on=(
            Code(f"{RENDERER}.__init__", "self._tokenize_prompt_async = make_async(self._tokenize_prompt"),
            Takes(f"{RENDERER}._detokenize_prompt", "prompt"),
            Takes(f"{RENDERER}._detokenize_prompt_async", "prompt"),
            Code(f"{RENDERER}._tokenize_singleton_prompt", "self._tokenize_prompt(", "self._detokenize_prompt("),
            Code(f"{RENDERER}._tokenize_singleton_prompt_async", "self._tokenize_prompt_async(",
                 "self._detokenize_prompt_async("),
        ),
    ),
    Hook(
        name="validation of bodies",
        what="A body's validation ends at the first wrong item of a list, and tries only a union's members of its type",
        why="An item of /v1/responses with an unknown type gave 237 errors, and 250 held the event loop for a second",
        until="vLLM's models discriminate their unions and end at first errors",
        replaces=("TypeAdapter.validator", "BaseModel.__pydantic_validator__"),
        relies_on=(
            Takes("pydantic_core:SchemaValidator", "schema", "_use_prebuilt"),
            Takes("pydantic_core.core_schema:dict_schema", "fail_fast"),
            Code("pydantic:TypeAdapter.validate_python", "self.validator.validate_python("),
            Code("pydantic:BaseModel.model_validate", "cls.__pydantic_validator__.validate_python("),
            Code("fastapi._compat:ModelField.validate", "self._type_adapter.validate_python("),
            Code("fastapi.dependencies.utils:solve_dependencies", "body_fields=dependant.body_params"),
            Takes("vllm.entrypoints.generate.factories:get_generate_invocation_types", "supported_tasks"),
        ),
    ),
    Hook(
        name="connections",
        what="uvicorn's protocol puts a request's connection into its scope, and chunks are written to it",
        why="A token is written to the socket without passing through the application's layers",
        until="uvicorn hands the connection to the application",
        overrides=(
            "HttpToolsProtocol._start_asgi_task", "HttpToolsProtocol.connection_lost",
            "HttpToolsProtocol.pause_writing", "HttpToolsProtocol.resume_writing",
        ),
        relies_on=(
            Takes(f"{UVICORN}:HttpToolsProtocol._start_asgi_task", "cycle", "app"),
            Takes(f"{UVICORN}:HttpToolsProtocol.connection_lost", "exc"),
            Code(f"{UVICORN}:RequestResponseCycle.__init__", "self.transport", "self.flow", "self.disconnected"),
            Code(f"{UVICORN}:RequestResponseCycle.__init__", "self.scope", "self.chunked_encoding"),
        ),
    ),
    Hook(
        name="limits of connections",
        what="uvicorn's protocol reports when a head or a body ends, and is not fed beyond the limits",
        why="uvicorn limits neither size nor time of heads, nor the time of bodies, and keeps silent connections open",
        until="uvicorn limits them",
        overrides=(
            "HttpToolsProtocol.connection_made", "HttpToolsProtocol.connection_lost",
            "HttpToolsProtocol.data_received", "HttpToolsProtocol.handle_websocket_upgrade",
            "HttpToolsProtocol.on_message_begin", "HttpToolsProtocol.on_header",
            "HttpToolsProtocol.on_headers_complete", "HttpToolsProtocol.on_body",
            "HttpToolsProtocol.on_message_complete", "HttpToolsProtocol.on_response_complete",
            "HttpToolsProtocol.timeout_keep_alive_handler", "HttpToolsProtocol.send_400_response",
        ),
        relies_on=(
            Code(f"{UVICORN}:HttpToolsProtocol.__init__", "httptools.HttpRequestParser(self)"),
            Code(f"{UVICORN}:HttpToolsProtocol.data_received", "self.parser.feed_data(data)"),
            Code(f"{UVICORN}:HttpToolsProtocol.on_message_begin", "self.url", "self.headers"),
            Code(f"{UVICORN}:HttpToolsProtocol.on_headers_complete", "self.cycle", "on_response_complete"),
            Code(f"{UVICORN}:RequestResponseCycle.receive", "self.disconnected", "self.message_event"),
        ),
    ),
)  # fmt: skip
