"""Differences between the supported versions of vLLM. All other code of this package is the same for each version.

A version of vLLM has a difference as long as it lacks the change that ``ended_by`` describes. The test reads vLLM's
code, as the registry of hooks does, so it also works for builds between two versions. ``last`` is the last minor
version that has the difference. When that version is no longer supported, a test fails, and the difference and its
branch are deleted.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

from tercet.vllm_plugin.hooks import Code, Expectation, Has, Takes

COMPLETIONS = "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion"
CHATS = "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat"
MESSAGE_ASSEMBLY = "vllm.entrypoints.openai.chat_completion.message_assembly"
RESPONSE_EVENTS = "vllm.entrypoints.openai.responses.streaming_events"
RESPONSE_PROTOCOL = "vllm.entrypoints.openai.responses.protocol"
CLI_ARGS = "vllm.entrypoints.common.cli_args"
FORMER_CLI_ARGS = "vllm.entrypoints.launchers.cli_args"


@dataclass(frozen=True)
class Difference:
    """A behaviour of older versions, up to ``last``, until a change that is visible in vLLM's code."""

    what: str
    last: str
    ended_by: Expectation

    @cached_property
    def is_here(self) -> bool:
        return bool(self.ended_by.unmet())


# ---- up to 0.31 ----------------------------------------------------------------------------------------------

PARSERS_LEFT_OUT = Difference(
    "the structured outputs' config of an engine's arguments does not name the parsers",
    last="0.31",
    ended_by=Takes("vllm.engine.arg_utils:AsyncEngineArgs.create_structured_outputs_config"),
)
SYSTEM_BALANCES = Difference(
    "serve_http does not choose among workers by their connections",
    last="0.31",
    ended_by=Takes("vllm.entrypoints.launchers.launcher:serve_http", "peer_loads"),
)
OFFSETS_OF_SENT_TEXT = Difference(
    "a streamed completion's text offsets refer to the sent text, not to its tokens",
    last="0.31",
    ended_by=Code(f"{COMPLETIONS}.completion_stream_generator", "next_text_offsets[i] = logprobs.text_offset[-1]"),
)
ZEROED_BY_BLOCK = Difference(
    "blocks are excluded from zeroing one by one, and one flag stands for mixed precisions and for states",
    last="0.31",
    ended_by=Takes("vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots", "skip_zeroing_group_ids"),
)
DRAWS_FOR_THE_VOCABULARY = Difference(
    "on a CPU a sampling step draws from a seeded request's generator once for each entry of the vocabulary",
    last="0.31",
    ended_by=Code("vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_cpu", "seeds[i] = torch.randint("),
)

ENDS_OF_AGENTS_APIS = Difference(
    "streams of Messages and Responses do not report at their end whether calls are complete, nor the streamed items",
    last="0.31",
    ended_by=Takes("vllm.entrypoints.anthropic.serving:_to_anthropic_stop_reason", "tool_complete"),
)

# ---- up to 0.32 ----------------------------------------------------------------------------------------------

OPTIONS_OF_LAUNCHERS = Difference(
    f"a server's options are in {FORMER_CLI_ARGS}", last="0.32", ended_by=Takes(f"{CLI_ARGS}:make_arg_parser", "parser")
)
CHUNKS_WITHOUT_TRANSFER = Difference(
    "chunks of streams have neither kv_transfer_params nor weight_versions",
    last="0.32",
    ended_by=Code(f"{COMPLETIONS}.completion_stream_generator", "weight_versions=", "kv_transfer_params="),
)
SILENT_ENDS = Difference(
    "a choice that ends without a token has no chunk, so its client does not get its finish reason",
    last="0.32",
    ended_by=Code(f"{COMPLETIONS}.completion_stream_generator", "not previous_num_tokens[i] and finish_reason is None"),
)
UNASKED_CALLS = Difference(
    "a chat stream has all tool calls that its parser finds, even with tool_choice none",
    last="0.32",
    ended_by=Takes(f"{MESSAGE_ASSEMBLY}:keeps_tool_calls", "request"),
)
CONVERTED_AS_TEXT = Difference(
    "streams of Anthropic's API are made from the text of chat streams, whose errors they cannot read",
    last="0.32",
    ended_by=Has(CHATS, "chat_completion_stream_generator_raw"),
)
CUT_ITEMS_COMPLETED = Difference(
    "a response that is cut short ends with response.completed, and its last item is completed",
    last="0.32",
    ended_by=Takes(f"{RESPONSE_EVENTS}:SimpleStreamingEventProcessor.close_current", "status"),
)

DIFFERENCES = tuple(each for each in [*globals().values()] if isinstance(each, Difference))


# ---- their consequences --------------------------------------------------------------------------------------


def cli_args() -> ModuleType:
    """Return vLLM's module with a server's options."""
    return importlib.import_module(FORMER_CLI_ARGS if OPTIONS_OF_LAUNCHERS.is_here else CLI_ARGS)


def structured_outputs_config(engine_args: Any) -> Any:
    """Return the structured outputs' config of an engine's arguments, with the parsers' options."""
    if not PARSERS_LEFT_OUT.is_here:
        return engine_args.create_structured_outputs_config()
    config = engine_args.structured_outputs_config
    if engine_args.reasoning_parser:
        config.reasoning_parser = engine_args.reasoning_parser
    if engine_args.reasoning_parser_plugin:
        config.reasoning_parser_plugin = engine_args.reasoning_parser_plugin
    return config


def has_mixed_precision(config: Any) -> bool:
    """True if a KV cache's groups have several precisions. Before 0.32, it must have no states: they share the flag."""
    return bool(config.needs_kv_cache_zeroing if ZEROED_BY_BLOCK.is_here else config.has_mixed_precision_kv_cache)


def keeps_tool_calls(serving: Any, request: Any) -> bool:
    """True if a chat stream has the tool calls that its parser finds."""
    if UNASKED_CALLS.is_here:
        return True
    keeps = importlib.import_module(MESSAGE_ASSEMBLY).keeps_tool_calls
    return bool(keeps(request, enable_auto_tools=serving.enable_auto_tools, parser_cls=serving.parser_cls))


def closed_items(processor: Any, finish_reason: str | None) -> Any:
    """Return vLLM's events that close a response's open item; without a ``finish_reason`` before its end."""
    if CUT_ITEMS_COMPLETED.is_here:
        return processor.close_current()
    status_of = importlib.import_module("vllm.entrypoints.openai.responses.utils").response_item_status
    return processor.close_current(status_of(finish_reason))


def last_response_event(response: Any) -> Any:
    """Return vLLM's last event of a stream of the Responses API, which has the whole response."""
    protocol = importlib.import_module(RESPONSE_PROTOCOL)
    given = {"sequence_number": -1, "response": response}
    if not CUT_ITEMS_COMPLETED.is_here and response.status == "incomplete":
        return protocol.ResponseIncompleteEvent(type="response.incomplete", **given)
    return protocol.ResponseCompletedEvent(type="response.completed", **given)
