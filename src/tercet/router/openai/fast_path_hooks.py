"""Hooks of the fast path: a router that is started with ``--fast-path off`` does not need them."""

from __future__ import annotations

from tercet.vllm_plugin.hooks import Expectation, Has, Hook, OneOf, Says, Takes

ASYNC_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
OUTPUTS = "vllm.v1.engine.output_processor"
DETOKENIZER = "vllm.v1.engine.detokenizer"
STATS = "vllm.v1.metrics.stats"
RENDERER = "vllm.renderers.base:BaseRenderer"
COMPLETIONS = "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion"
CHAT_PROTOCOL = "vllm.entrypoints.openai.chat_completion.protocol"
PARSERS = "vllm.parser.abstract_parser"
PARSER_ENGINE = "vllm.parser.engine.streaming_parser_engine"
SCANNER = "vllm.parser.engine.token_id_scanner:TokenIDScanner"
STREAM_PROCESSOR = "vllm.entrypoints.openai.chat_completion.stream_processor"
HERMES = "vllm.tool_parsers.hermes_tool_parser:Hermes2ProToolParser"
CHATS = "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat"
MESSAGES = "vllm.entrypoints.anthropic.serving"
MESSAGE_PROTOCOL = "vllm.entrypoints.anthropic.protocol"
RESPONSES = "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses"
RESPONSE_EVENTS = "vllm.entrypoints.openai.responses.streaming_events"
RESPONSE_CONTEXT = "vllm.entrypoints.openai.responses.context:SimpleContext"
# Identifies vLLM 0.31, in which these requests take vLLM's own path.
FORMER = Says(f"{MESSAGES}:AnthropicServingMessages.__init__", "self.stop_reason_map = {")


def since_0_32(*expectations: Expectation) -> tuple[OneOf, ...]:
    """Return ``expectations``, each with vLLM 0.31 as an alternative, because the fast path is not used there."""
    return tuple(OneOf(expectation, FORMER) for expectation in expectations)


HOOKS = (
    Hook(
        name="prepared streams",
        what="Copies of vLLM's serving objects prepare a stream, and stop before they generate and write it",
        why="The chunks of a stream do not need the objects, queues and tasks between the engine and the socket",
        until="vLLM has a call that renders and checks a request without serving it, and its own chunks cost as little",
        copies=(
            "OpenAIServingCompletion.engine_client", "OpenAIServingCompletion.completion_stream_generator",
            "OpenAIServingChat.engine_client", "OpenAIServingChat.chat_completion_stream_generator",
            "OpenAIServingChat._make_parser",
        ),
        relies_on=(
            Takes(f"{ASYNC_LLM}.generate", "prompt", "sampling_params", "request_id"),
            Takes(f"{ASYNC_LLM}.add_request", "request_id", "prompt", "params"),
            Says(COMPLETIONS, "async def create_completion(", "self.engine_client.generate(",
                 "return self.completion_stream_generator("),
            Takes(f"{COMPLETIONS}.completion_stream_generator", "request", "engine_inputs", "result_generator"),
            Takes(f"{COMPLETIONS}.completion_stream_generator", "request_id", "created_time", "model_name"),
            Says(CHATS, "async def create_chat_completion(", "self.engine_client.generate(",
                 "return self.chat_completion_stream_generator("),
            Takes(f"{CHATS}.chat_completion_stream_generator", "request", "result_generator"),
            Takes(f"{CHATS}.chat_completion_stream_generator", "request_id", "model_name"),
            Takes(f"{CHATS}.get_chat_request_role", "request"),
            Has(COMPLETIONS, "create_streaming_error_response", "_raise_if_error"),
            Has(COMPLETIONS, "_convert_generation_error_to_streaming_response"),
            Takes(f"{CHATS}.chat_completion_stream_generator", "tokenizer", "chat_template_kwargs", "mm_token_counts"),
            Takes("vllm.entrypoints.serve.utils.api_utils:should_include_usage", "stream_options",
                  "enable_force_include_usage"),
            Says(COMPLETIONS, "self.enable_prompt_tokens_details", "self.system_fingerprint"),
            Says(CHATS, "self.enable_prompt_tokens_details", "self.system_fingerprint"),
        ),
    ),
    Hook(
        name="chunks of streams",
        what="Tercet writes chunks with the fields that vLLM's stream generators set",
        why="An object for each chunk costs more than all other work for a token",
        until="vLLM's own chunks cost as little",
        relies_on=(
            Says(COMPLETIONS, "prompt_token_ids=prompt_token_ids_to_return",
                 "chunk.model_dump_json(exclude_unset=True)", "exclude_unset=False, exclude_none=True"),
            OneOf(
                Says(CHATS, "exclude_unset=True, exclude_none=not chunk.choices", "finish_reason=finish_reason,",
                     "stop_reason=output.stop_reason",
                     "weight_versions=(output.weight_versions if request.return_weight_versions else None)",
                     "kv_transfer_params=(res.kv_transfer_params if finish_reason_sent[i] else None)",
                     "self._include_reasoning_tokens_details"),
                Says(CHATS, "finish_reason=finish_reason_", "stop_reason=output.stop_reason",
                     "chunk.model_dump_json(exclude_unset=True)", "self._include_reasoning_tokens_details",
                     "exclude_unset=True, exclude_none=True"),
            ),
            Has(f"{CHAT_PROTOCOL}:ChatCompletionStreamResponse", "model_fields"),
            Says(f"{CHAT_PROTOCOL}:ChatCompletionStreamResponse", "usage:", "system_fingerprint:", "prompt_token_ids:",
                 "prompt_text:"),
            Says("vllm.entrypoints.serve.engine.protocol:UsageInfo", "prompt_tokens:", "total_tokens:",
                 "completion_tokens:", "prompt_tokens_details:", "completion_tokens_details:"),
        ),
    ),
    Hook(
        name="parsers",
        what="Tercet calls vLLM's parser of tools and reasoning for each output, and writes its delta",
        why="An agent's stream must cost little more than a plain one",
        until="vLLM's own chunks cost as little",
        relies_on=(
            Takes(f"{CHATS}._make_parser", "request", "tokenizer", "chat_template_kwargs"),
            Says(f"{CHATS}", "parser = self._make_parser(request, tokenizer, chat_template_kwargs)"),
            OneOf(
                Says(f"{STREAM_PROCESSOR}:ChatStreamProcessor", "self.keep_tool_calls = keeps_tool_calls(",
                     "parser is not None and not request.include_reasoning",
                     "if not delta_text and not delta_token_ids and not self.num_output_tokens:",
                     "self.parser.parse_delta(", "self.tools_streamed = True",
                     "delta.tool_calls = [] if not delta.content and not delta.reasoning: delta = None",
                     "maybe_filter_parallel_tool_calls(delta, self.request)", "resolve_finish_reason("),
                Says(CHATS, "delta_message = parser.parse_delta(", "tools_streamed[i] = True",
                     "not request.include_reasoning and parser is not None", "delta_message = DeltaMessage()",
                     'finish_reason_ = "tool_calls"', "maybe_filter_parallel_tool_calls(choice_data, request)"),
            ),
            Takes(f"{PARSERS}:Parser.parse_delta", "delta_text", "delta_token_ids", "request", "prompt_token_ids"),
            Takes(f"{PARSERS}:Parser.parse_delta", "finished"),
            Takes(f"{PARSERS}:Parser.count_reasoning_tokens", "token_ids"),
            Says("vllm.entrypoints.serve.utils.tool_calls_utils:maybe_filter_parallel_tool_calls",
                 "parallel_tool_calls is not False", "tool_call.index == 0"),
            Says("vllm.entrypoints.generate.base.protocol:DeltaMessage", "content:", "reasoning:", "tool_calls:",
                 'data.pop("tool_calls", None)'),
            Has(f"{CHAT_PROTOCOL}:ChatCompletionNamedToolChoiceParam", "model_fields"),
        ),
    ),
    Hook(
        name="parts of parsers",
        what="Counters of tool parsers' calls, tables of dropped special tokens, and the texts of tokens are made once",
        why="The counters took a sixth of the time to parse a tool call, the tables half of the time to make a parser",
        until="vLLM caches them",
        replaces=(
            "abstract_parser.record_tool_parser_invocation", "streaming_parser_engine._build_drop_info",
            "streaming_parser_engine.TokenIDScanner",
        ),
        relies_on=(
            Takes(f"{PARSERS}:record_tool_parser_invocation", "is_tool_called", "is_streaming", "request"),
            Says("vllm.parser.metrics:record_tool_parser_invocation",
                 "if _tool_call_parser_invocations is None: return",
                 "case ChatCompletionRequest(): request_type = RequestType.CHAT_COMPLETIONS",
                 "case ResponsesRequest(): request_type = RequestType.RESPONSES",
                 "ToolCallOutcome.TOOL_CALL if is_tool_called else ToolCallOutcome.NO_TOOL_CALL",
                 "model_name=_model_name", 'mode="streaming" if is_streaming else "non_streaming"',
                 "outcome=outcome.value", "request_type=request_type.value"),
            Takes(f"{PARSER_ENGINE}:_build_drop_info", "config", "tokenizer"),
            Says(f"{PARSER_ENGINE}:StreamingParserEngine.__init__", "drop_info = _build_drop_info(config, tokenizer)",
                 "resolved_token_ids.update(drop_info.extra_token_ids)", "lexer_shape = drop_info.lexer_shape",
                 "self._scanner = TokenIDScanner("),
            Takes(f"{SCANNER}.__init__", "token_id_to_terminal", "tokenizer"),
            Says(f"{SCANNER}._decode_token", "self._token_text_cache[token_id] = (", "return self._token_text_cache"),
        ),
    ),
    Hook(
        name="passed text",
        what="Texts between markers bypass vLLM's parser; its state is updated with them before it reads again",
        why="A parser costs as much for such a text as all other work for a token; Hermes' parser more in a long call",
        until="vLLM's parsers pass such texts on without parsing",
        relies_on=(
            Says(f"{PARSERS}:StreamState.advance", "if self.engine_based: return delta_text, delta_token_ids",
                 "self.previous_text + delta_text", "self.previous_token_ids + delta_token_ids"),
            Says(f"{PARSERS}:DelegatingParser.parse_delta",
                 "not state.prompt_reasoning_checked and prompt_token_ids is not None",
                 "if self._in_reasoning_phase(state):", "has_engine_confirmed_reasoning_end()",
                 "if self._in_tool_call_phase(state):", "if not state.tool_call_text_started:",
                 "delta_message = DeltaMessage(content=delta_text)", "state.commit(current_text, current_token_ids)",
                 "if finished:"),
            Says(f"{PARSERS}:DelegatingParser._extract_tool_calls_streaming", 'if request.tool_choice == "none":',
                 "DeltaMessage(content=delta_text) if delta_text else None"),
            Says(f"{PARSER_ENGINE}:StreamingParserEngine.feed", "self._ever_had_token_ids = True",
                 "and not self._lexer.buffer", "and not self._scanner._deferred_terminals",
                 "self._lexer._literal_first_chars.isdisjoint(delta_text)", "if tid in self._resolved_token_ids:",
                 "self._emit_for_state(delta_text, token_count=len(delta_token_ids))",
                 "self._record_reasoning_tokens(events)"),
            Says("vllm.parser.engine.parser_engine:ParserEngine._events_to_delta",
                 "carried_deferred = self._deferred_content", "if self._content_has_nonws:"),
            Says(f"{HERMES}._extract_content", "partial_tag_overlap(", "self._sent_content_idx = sendable_idx"),
            Says(f"{HERMES}._extract_tool_call_jsons", "raw = raw[:-overlap]", "tc_json = raw.strip()",
                 "is_complete_json(tc_json)"),
            Says(f"{HERMES}._compute_args_diff", "self.streamed_args_for_tool[index] = args",
                 'self.prev_tool_call_arr[index]["arguments"] = args'),
            Says(f"{HERMES}.extract_tool_calls_streaming", 'if "name" not in self.prev_tool_call_arr[i]:',
                 "DeltaFunctionCall(arguments=args_diff)", "content=content, tool_calls=tool_call_deltas"),
        ),
    ),
    Hook(
        name="log probabilities",
        what="Tercet writes log probabilities from the engine's numbers; vLLM's record gets the tokens only",
        why="Arrays, dicts and objects for each token cost more than all other work in such a stream",
        until="vLLM's own chunks cost as little",
        relies_on=(
            Takes(f"{CHATS}._create_chat_logprobs", "token_ids", "top_logprobs", "num_output_top_logprobs"),
            Takes(f"{CHATS}._create_chat_logprobs", "logprob_token_ids", "return_as_token_id"),
            Takes(f"{COMPLETIONS}._create_completion_logprobs", "token_ids", "top_logprobs"),
            Takes(f"{COMPLETIONS}._create_completion_logprobs", "num_output_top_logprobs", "initial_text_offset"),
            Says(f"{CHATS}._create_chat_logprobs", "max(step_token.logprob, -9999.0)", 'errors="replace"'),
            Says("vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs", "convert_ids_list_to_tokens(",
                 "self._get_sampled_context_ids(self.logprobs)", "self._verify_tokens(",
                 "append_logprobs_for_next_position("),
            Says("vllm.v1.engine.logprobs:LogprobsProcessor._get_sampled_context_ids", "next(iter(entry))"),
            Says("vllm.logprobs:append_logprobs_for_next_position", "range(1, num_logprobs + 1)"),
            Takes("vllm.tokenizers.detokenizer_utils:convert_ids_list_to_tokens", "tokenizer", "token_ids"),
        ),
    ),
    Hook(
        name="headers of streams",
        what="Answers pass through copies of vLLM's layers that add headers; silent streams get vLLM's comments",
        why="Browsers and proxies need the headers and comments; these layers change only the headers",
        until="the layers can be applied to one answer",
        copies=("CORSMiddleware.app", "XRequestIdMiddleware.app"),
        relies_on=(
            Takes("vllm.entrypoints.serve.middleware.x_request_id:XRequestIdMiddleware"),
            Takes("starlette.middleware.cors:CORSMiddleware"),
            Has("vllm.entrypoints.serve.utils.sse_keep_alive:SSE_KEEP_ALIVE_COMMENT", "encode"),
        ),
    ),
    Hook(
        name="output processor",
        what="The stream's own task passes outputs to OutputProcessor, and reads its records",
        why="vLLM makes the results that only it can make, and updates its counters",
        until="AsyncLLM has a call that processes one request's outputs",
        relies_on=(
            Takes(f"{OUTPUTS}:OutputProcessor.process_outputs", "engine_core_outputs", "iteration_stats"),
            Takes(f"{OUTPUTS}:OutputProcessor.abort_requests", "request_ids", "internal"),
            Says(f"{OUTPUTS}:OutputProcessor.__init__", "self.request_states"),
            Says(f"{OUTPUTS}:RequestState.__init__", "self.prompt_token_ids", "self.detokenizer", "self.queue"),
            Says(f"{OUTPUTS}:RequestState.__init__", "self.request_index", "self.logprobs_processor"),
            Says(f"{OUTPUTS}:RequestState.__init__", "self.stats", "self.stream_interval"),
            Says(f"{OUTPUTS}:RequestState.__init__", "self.parent_req"),
            Says(f"{ASYNC_LLM}.add_request", "ParentRequest(", "queue", "self.engine_core.add_request_async("),
            Has(f"{OUTPUTS}:RequestOutputCollector", "put", "get_nowait", "close"),
        ),
    ),
    Hook(
        name="detokenizer",
        what="The text of tokens that are whole characters is looked up instead of decoded",
        why="Such tokens of a byte-level vocabulary always have the same text, and most tokens are of this kind",
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
        what="Tokens that bypassed vLLM's own path are added to its iteration statistics",
        why="vLLM's metrics must count every token that a client received",
        until="the loggers accept counts of tokens",
        relies_on=(
            Says(f"{STATS}:IterationStats.update_from_output", "self.num_generation_tokens +=",
                 "req_stats.num_generation_tokens +=", "req_stats.last_token_ts",
                 "self.inter_token_latencies_iter.append("),
            Has(f"{STATS}:RequestStateStats", "num_generation_tokens", "last_token_ts"),
            Says(f"{ASYNC_LLM}.__init__", "self.logger_manager"),
        ),
    ),
    Hook(
        name="short prompts",
        what="Short prompts and chats are rendered on the event loop, with the inner tokenizer of transformers' one",
        why="A thread and a task for each prompt cost more than rendering a short one",
        until="the renderer has a limit below which it stays on the event loop",
        overrides=(
            "BaseRenderer._tokenize_prompt", "BaseRenderer._tokenize_prompt_async", "BaseRenderer.render_cmpl_async",
            "BaseRenderer.render_chat_async", "BaseRenderer.get_eos_token_id",
        ),
        relies_on=(
            Takes(f"{RENDERER}._tokenize_prompt", "prompt", "params"),
            Says(f"{RENDERER}.__init__", "self._tokenize_prompt_async"),
            Takes(f"{RENDERER}.render_cmpl", "prompts"),
            Takes(f"{RENDERER}.render_cmpl_async", "prompts"),
            Takes(f"{RENDERER}.render_chat", "conversations", "chat_params"),
            Takes(f"{RENDERER}.render_chat_async", "conversations", "chat_params"),
            Has("vllm.renderers.params:ChatParams", "chat_template_kwargs"),
            Says("vllm.renderers.params:TokenizeParams.get_encode_kwargs", "truncation=max_length is not None",
                 "max_length=max_length", "add_special_tokens=self.add_special_tokens"),
            Takes("transformers:TokenizersBackend"),
        ),
    ),
    Hook(
        name="HTTP metrics",
        what="Requests that bypassed vLLM's metrics middleware are added to its metrics",
        why="http_requests_total and the other HTTP metrics must count every request",
        until="the middleware has a call that records a request",
        relies_on=(
            Says("prometheus_fastapi_instrumentator.middleware:PrometheusInstrumentatorMiddleware",
                 "instrumentations"),
            Takes("prometheus_fastapi_instrumentator.metrics:Info", "request", "response", "modified_handler"),
        ),
    ),
    Hook(
        name="streams of Messages",
        what="Tercet writes the content blocks; a copy of vLLM's serving object prepares the request as a chat stream",
        why="vLLM makes chat chunks first and then converts each of them",
        until="vLLM's own events cost as little",
        copies=(
            "AnthropicServingMessages.engine_client", "AnthropicServingMessages.chat_completion_stream_generator",
            "AnthropicServingMessages.message_stream_converter",
        ),
        relies_on=since_0_32(
            Says(f"{MESSAGES}:AnthropicServingMessages.create_messages", "await self.create_chat_completion("),
            Says(f"{MESSAGES}:AnthropicServingMessages.message_stream_converter", 'type="signature_delta"',
                 'type="content_block_stop"', "buffered = list(state.pending_content)", 'type="message_start"',
                 "usage=_build_anthropic_usage(origin_chunk.usage)", "for event in stop_and_flush():",
                 'finish_reason or "stop"', 'tool_used and _is_json("".join(last_tool_args))',
                 'state.block_type != "thinking"', 'state.block_type == "tool_use"', 'state.block_type != "text"',
                 "tool_index_to_id[tool_call.index] = tool_call.id", "state.tool_use_id != tool_call.id",
                 "tool_used = True", "last_tool_args = []"),
            Takes(f"{MESSAGES}:_to_anthropic_stop_reason", "finish_reason", "stop_reason", "tool_used"),
            Takes(f"{MESSAGES}:_to_anthropic_stop_reason", "tool_complete"),
            Says(f"{MESSAGES}:_build_anthropic_usage", "input_tokens -= cache_read",
                 'kwargs["cache_read_input_tokens"] = cache_read', "input_tokens -= cache_creation",
                 "max(0, input_tokens)"),
            Says(f"{MESSAGE_PROTOCOL}:AnthropicStreamEvent", "type:", "message:", "delta:", "content_block:", "index:",
                 "error:", "usage:"),
            Says(f"{MESSAGE_PROTOCOL}:AnthropicUsage", "input_tokens:", "output_tokens:",
                 "cache_creation_input_tokens:", "cache_read_input_tokens:"),
        ),
    ),
    Hook(
        name="streams of Responses",
        what="vLLM makes the events that begin and end items and the response; Tercet writes the deltas between them",
        why="An event object for each delta costs more than all other work for a token",
        until="vLLM's own events cost as little",
        copies=(
            "OpenAIServingResponses.engine_client", "OpenAIServingResponses._generate_with_builtin_tools",
            "OpenAIServingResponses.responses_stream_generator",
        ),
        relies_on=since_0_32(
            Takes(f"{RESPONSES}._generate_with_builtin_tools", "request_id", "engine_input", "sampling_params"),
            Takes(f"{RESPONSES}._generate_with_builtin_tools", "context", "tok_params", "lora_request"),
            Says(f"{RESPONSES}._generate_with_builtin_tools", 'sub_request_id = f"{request_id}_{sub_request}"',
                 "self._log_inputs(", "self.engine_client.generate(", "context.append_output(res)"),
            Takes(f"{RESPONSES}.responses_stream_generator", "request", "sampling_params", "result_generator"),
            Takes(f"{RESPONSES}.responses_stream_generator", "context", "model_name", "tokenizer", "request_metadata"),
            Says(f"{RESPONSES}.responses_stream_generator", 'hasattr(event, "sequence_number")',
                 'type="response.created"', 'type="response.in_progress"', "response=initial_response",
                 "await self.responses_full_generator(", "empty_async_generator()"),
            Says(f"{RESPONSES}._process_simple_streaming_events", "ctx.response_parser.parse_delta(",
                 "if not delta_message:", "maybe_filter_parallel_tool_calls(delta_message, request)",
                 "for dm in split_delta(delta_message):", "processor.resolve_target_state(dm)",
                 "processor.needs_transition(target_state, tool_call)", "processor.close_current()",
                 "processor.open(target_state, tool_call)", "processor.emit_delta(",
                 "context.streamed_output_items = processor.output_items"),
            Says(f"{RESPONSES}.responses_full_generator", "context.num_output_tokens", "context._accumulated"),
            Has(f"{RESPONSE_EVENTS}:SimpleStreamingEventProcessor", "_STATE_HANDLERS", "resolve_target_state"),
            Says(f"{RESPONSE_EVENTS}:SimpleStreamingEventProcessor.emit_delta", "combined_args += tc.function"),
            Takes(f"{RESPONSE_EVENTS}:emit_simple_content_delta", "state", "delta"),
            Takes(f"{RESPONSE_EVENTS}:emit_simple_reasoning_delta", "state", "delta"),
            Takes(f"{RESPONSE_EVENTS}:emit_simple_tool_call_delta", "state", "delta"),
            Has(f"{RESPONSE_CONTEXT}", "append_output"),
            Says(f"{RESPONSE_CONTEXT}.__init__", "self.streamed_output_items"),
        ),
    ),
)  # fmt: skip
