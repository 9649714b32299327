"""Hooks for Messages and Responses, which the fast path serves from vLLM 0.32 on."""

from __future__ import annotations

from tercet.vllm_plugin.expectations import Expectation, Has, OneOf, Says, Takes
from tercet.vllm_plugin.hooks import Hook

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


AGENT_API_HOOKS = (
    Hook(
        name="streams of Messages",
        what="Tercet writes the content blocks; a copy of vLLM's serving object prepares the request as a chat stream",
        why="vLLM makes chat chunks first and then converts each of them",
        until="vLLM's own events cost as little",
        copies=(
            "AnthropicServingMessages.engine_client",
            "AnthropicServingMessages.chat_completion_stream_generator",
            "AnthropicServingMessages.message_stream_converter",
        ),
        relies_on=since_0_32(
            Says(f"{MESSAGES}:AnthropicServingMessages.create_messages", "await self.create_chat_completion("),
            Says(
                f"{MESSAGES}:AnthropicServingMessages.message_stream_converter",
                'type="signature_delta"',
                'type="content_block_stop"',
                "buffered = list(state.pending_content)",
                'type="message_start"',
                "usage=_build_anthropic_usage(origin_chunk.usage)",
                "for event in stop_and_flush():",
                'finish_reason or "stop"',
                'tool_used and _is_json("".join(last_tool_args))',
                'state.block_type != "thinking"',
                'state.block_type == "tool_use"',
                'state.block_type != "text"',
                "tool_index_to_id[tool_call.index] = tool_call.id",
                "state.tool_use_id != tool_call.id",
                "tool_used = True",
                "last_tool_args = []",
            ),
            Takes(f"{MESSAGES}:_to_anthropic_stop_reason", "finish_reason", "stop_reason", "tool_used"),
            Takes(f"{MESSAGES}:_to_anthropic_stop_reason", "tool_complete"),
            Says(
                f"{MESSAGES}:_build_anthropic_usage",
                "input_tokens -= cache_read",
                'kwargs["cache_read_input_tokens"] = cache_read',
                "input_tokens -= cache_creation",
                "max(0, input_tokens)",
            ),
            Says(
                f"{MESSAGE_PROTOCOL}:AnthropicStreamEvent",
                "type:", "message:", "delta:", "content_block:", "index:", "error:", "usage:",
            ),
            Says(
                f"{MESSAGE_PROTOCOL}:AnthropicUsage",
                "input_tokens:", "output_tokens:", "cache_creation_input_tokens:", "cache_read_input_tokens:",
            ),
        ),
    ),
    Hook(
        name="streams of Responses",
        what="vLLM makes the events that begin and end items and the response; Tercet writes the deltas between them",
        why="An event object for each delta costs more than all other work for a token",
        until="vLLM's own events cost as little",
        copies=(
            "OpenAIServingResponses.engine_client",
            "OpenAIServingResponses._generate_with_builtin_tools",
            "OpenAIServingResponses.responses_stream_generator",
        ),
        relies_on=since_0_32(
            Takes(f"{RESPONSES}._generate_with_builtin_tools", "request_id", "engine_input", "sampling_params"),
            Takes(f"{RESPONSES}._generate_with_builtin_tools", "context", "tok_params", "lora_request"),
            Says(
                f"{RESPONSES}._generate_with_builtin_tools",
                'sub_request_id = f"{request_id}_{sub_request}"',
                "self._log_inputs(",
                "self.engine_client.generate(",
                "context.append_output(res)",
            ),
            Takes(f"{RESPONSES}.responses_stream_generator", "request", "sampling_params", "result_generator"),
            Takes(f"{RESPONSES}.responses_stream_generator", "context", "model_name", "tokenizer", "request_metadata"),
            Says(
                f"{RESPONSES}.responses_stream_generator",
                'hasattr(event, "sequence_number")',
                'type="response.created"',
                'type="response.in_progress"',
                "response=initial_response",
                "await self.responses_full_generator(",
                "empty_async_generator()",
            ),
            Says(
                f"{RESPONSES}._process_simple_streaming_events",
                "ctx.response_parser.parse_delta(",
                "if not delta_message:",
                "maybe_filter_parallel_tool_calls(delta_message, request)",
                "for dm in split_delta(delta_message):",
                "processor.resolve_target_state(dm)",
                "processor.needs_transition(target_state, tool_call)",
                "processor.close_current()",
                "processor.open(target_state, tool_call)",
                "processor.emit_delta(",
                "context.streamed_output_items = processor.output_items",
            ),
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
