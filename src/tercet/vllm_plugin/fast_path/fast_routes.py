"""The routes of the fast path: vLLM's serving objects prepare a request, and stop before they generate.

Relies on ``create_completion``, ``create_chat_completion``, ``create_messages`` and ``create_responses`` of serving
objects rendering and validating a request before they return its stream. They make the stream with
``completion_stream_generator``, ``chat_completion_stream_generator`` and ``responses_stream_generator`` from the result
of ``engine_client.generate``. Chat makes a parser with ``_make_parser``, whose ``is_reasoning_end`` it calls with the
prompt, and then one with the same arguments for each choice. Messages also passes the chat stream through
``message_stream_converter``; Responses uses the result of ``_generate_with_builtin_tools``.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request

from tercet.protocol.errors import MESSAGES
from tercet.protocol.headers import CHAT, COMPLETIONS, RESPONSES
from tercet.vllm_plugin.differences import ENDS_OF_AGENTS_APIS, OFFSETS_OF_SENT_TEXT
from tercet.vllm_plugin.fast_path.sse_chunks import ChunkWriter, chat_format, completion_format
from tercet.vllm_plugin.fast_path.stream_plan import (
    Parsers,
    StreamPlan,
    chat_plan,
    completion_plan,
    message_plan,
    response_plan,
)
from tercet.wire.serving.request_context import current


@dataclass(frozen=True)
class FastRoute:
    """One route: the ``model`` of its bodies, a test of a body (``takes``), and a function that prepares its stream."""

    model: Any
    takes: Callable[[Any], bool]
    prepare: Callable[[Any, Request], Awaitable[Any]]


def routes_of(state: Any, engine_client: Any) -> dict[str, FastRoute]:
    """Return the routes by path; ``state`` has this server's serving objects."""
    makers: dict[str, tuple[str, Callable[[Any, Any], FastRoute]]] = {
        COMPLETIONS: ("openai_serving_completion", completion_route),
        CHAT: ("openai_serving_chat", chat_route),
    }
    if not ENDS_OF_AGENTS_APIS.is_here:
        makers[MESSAGES] = "anthropic_serving_messages", message_route
        makers[RESPONSES] = "openai_serving_responses", response_route
    found = {path: (getattr(state, name, None), make) for path, (name, make) in makers.items()}
    return {path: make(serving, engine_client) for path, (serving, make) in found.items() if serving is not None}


# ---- which requests they take --------------------------------------------------------------------------------


def is_fast_completion(request: Any) -> bool:
    """True if the fast path can write this completion's chunks."""
    return (
        _is_one_prompt(request.prompt)
        and is_fast_chat(request)
        and request.prompt_embeds is None
        and (request.logprobs is None or not OFFSETS_OF_SENT_TEXT.is_here)
    )


def is_fast_chat(request: Any) -> bool:
    """True if the fast path can write this chat answer's chunks; a completion must meet more conditions."""
    return bool(request.stream) and not (
        request.echo
        or request.prompt_logprobs is not None
        or request.use_beam_search
        or getattr(request, "return_weight_versions", False)  # not in vLLM before 0.33
    )


def _is_one_prompt(prompt: Any) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int))


def is_fast_response(request: Any, serving: Any) -> bool:
    """True if the fast path can write this response's events."""
    return bool(request.stream) and not (
        request.background
        or (request.store and serving.enable_store)
        or request.enable_response_messages
        or request.is_include_output_logprobs()
    )


# ---- vLLM's serving objects ----------------------------------------------------------------------------------


class PreparingClient:
    """Replacement for a serving object's engine client: records a request instead of generating for it."""

    def __init__(self, engine_client: Any) -> None:
        self._engine_client = engine_client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine_client, name)

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **more: Any) -> None:
        """Record how to add the request, in place of ``AsyncLLM.generate``."""
        current().add_request = partial(
            self._engine_client.add_request, request_id, prompt, sampling_params, **more
        )  # fmt: skip


def completion_route(serving: Any, engine_client: Any) -> FastRoute:
    """Return the route of completions: a copy of vLLM's ``serving`` object returns a plan instead of a stream."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    def plan(
        request: Any, _inputs: Any, _results: Any, request_id: str, created: int, model: str, **_: Any
    ) -> StreamPlan:
        return completion_plan(serving, request, ChunkWriter(completion_format(), request_id, created, model))

    preparing = copy.copy(serving)
    preparing.engine_client, preparing.completion_stream_generator = PreparingClient(engine_client), plan
    return FastRoute(CompletionRequest, is_fast_completion, preparing.create_completion)


def chat_route(serving: Any, engine_client: Any) -> FastRoute:
    """Return the route of chat answers: a copy of vLLM's ``serving`` object returns a plan instead of a stream."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    def plan(
        request: Any, request_id: str, model: str, tokenizer: Any, chat_template_kwargs: Any, mm_token_counts: Any
    ) -> StreamPlan:
        chunks = ChunkWriter(chat_format(), request_id, int(time.time()), model)
        parsers = Parsers(serving, request, tokenizer, chat_template_kwargs, current().parser)
        return chat_plan(serving, request, chunks, parsers, mm_token_counts)

    preparing = _preparing_chat(serving, engine_client, plan)
    return FastRoute(ChatCompletionRequest, is_fast_chat, preparing.create_chat_completion)


def message_route(serving: Any, engine_client: Any) -> FastRoute:
    """Return the route of Messages, which vLLM converts from a chat answer."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest

    def plan(
        request: Any, request_id: str, model: str, tokenizer: Any, chat_template_kwargs: Any, _mm_token_counts: Any
    ) -> StreamPlan:  # Anthropic's usage has no count of media tokens
        parsers = Parsers(serving, request, tokenizer, chat_template_kwargs, current().parser)
        return message_plan(serving, request, request_id, model, parsers)

    preparing = _preparing_chat(serving, engine_client, plan)
    preparing.message_stream_converter = lambda prepared: prepared
    return FastRoute(AnthropicMessagesRequest, lambda request: bool(request.stream), preparing.create_messages)


def _preparing_chat(serving: Any, engine_client: Any, plan: Callable[..., StreamPlan]) -> Any:
    """Return a copy of a serving object that returns a plan instead of a chat stream."""

    def planned(
        request: Any, _results: Any, request_id: str, model: str, _conversation: Any, tokenizer: Any, _metadata: Any,
        chat_template_kwargs: Any = None, mm_token_counts: Any = None,
    ) -> StreamPlan:  # fmt: skip
        return plan(request, request_id, model, tokenizer, chat_template_kwargs, mm_token_counts)

    def make_parser(*args: Any) -> Any:
        made = current().parser = serving._make_parser(*args)
        return made

    preparing = copy.copy(serving)
    preparing.engine_client, preparing.chat_completion_stream_generator = PreparingClient(engine_client), planned
    preparing._make_parser = make_parser
    return preparing


def response_route(serving: Any, engine_client: Any) -> FastRoute:
    """Return the route of Responses; vLLM serves the requests that use the server's tools."""
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    preparing, client = copy.copy(serving), PreparingClient(engine_client)

    def generate(
        request_id: str, engine_input: Any, sampling_params: Any, context: Any, tok_params: Any = None,
        max_tool_calls: int | None = None, **more: Any,
    ) -> None:  # fmt: skip
        del context, tok_params, max_tool_calls  # only tools that the server calls need these
        first = f"{request_id}_0"
        preparing._log_inputs(first, engine_input, params=sampling_params, lora_request=more.get("lora_request"))
        client.generate(engine_input, sampling_params, first, **more)

    def plan(request: Any, sampling_params: Any, _results: Any, context: Any, *more: Any) -> StreamPlan | None:
        return response_plan(serving, request, sampling_params, context, *more)

    preparing.engine_client, preparing._generate_with_builtin_tools = client, generate
    preparing.responses_stream_generator = plan
    return FastRoute(ResponsesRequest, partial(is_fast_response, serving=serving), preparing.create_responses)
