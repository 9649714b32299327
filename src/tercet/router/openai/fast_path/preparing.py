"""What vLLM prepares for a stream of each API: a copy of its serving object reads, checks and renders a request.

The copy returns a plan instead of a stream. A request that the fast path does not support, or that the serving object
refuses, has no plan.

Relies on FastAPI passing serving objects the result of ``model_validate`` for a JSON body; on ``create_completion``,
``create_chat_completion``, ``create_messages`` and ``create_responses`` of serving objects rendering and validating a
request before they return its stream. They make the stream with ``completion_stream_generator``,
``chat_completion_stream_generator`` and ``responses_stream_generator`` from the result of ``engine_client.generate``,
which ``merge_async_iterators`` makes pairs of, of a prompt's number and a result, for completions.
Chat makes a parser with ``_make_parser``, whose ``is_reasoning_end`` it calls with the prompt, and then one with the
same arguments for each choice. Messages also passes the chat stream through ``message_stream_converter``; Responses
uses the result of ``_generate_with_builtin_tools``. ``should_include_usage`` returns whether usage is sent at the end,
and whether with each chunk.
"""

from __future__ import annotations

import argparse
import copy
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.entrypoints.serve.utils.api_utils import should_include_usage

from tercet.protocol.errors import MESSAGES
from tercet.protocol.headers import CHAT, COMPLETIONS, RESPONSES
from tercet.router.openai.fast_path.agent_answers import MessageAnswer, ResponseAnswer, ResponseTask
from tercet.router.openai.fast_path.parsed_text import Parsing, keep_parser_parts
from tercet.router.openai.fast_path.request_stream import (
    Adding,
    FastPath,
    FastRoute,
    HttpMetrics,
    StreamPlan,
    StreamStats,
    StreamTools,
)
from tercet.router.openai.fast_path.sse_chunks import (
    CHAT_FORMAT,
    COMPLETION_FORMAT,
    ChunkAnswer,
    ChunkWriter,
    counts_reasoning,
    installed,
)
from tercet.router.openai.fast_path.token_texts import Logprobs, TokenPieces, texts_of
from tercet.vllm_plugin.differences import ENDS_OF_AGENTS_APIS, OFFSETS_OF_SENT_TEXT, keeps_tool_calls
from tercet.wire.serving.server_access import current

logger = logging.getLogger(__name__)


def fast_path(app: Any, state: Any, args: argparse.Namespace, engine_client: Any) -> FastPath | None:
    """Return the fast path of ``app``; None if the options ``args`` forbid it. ``state`` has the serving objects."""
    # The user's middleware may read answers; the other options make vLLM's own path log or count more.
    if (
        args.middleware
        or args.enable_log_outputs
        or args.enable_server_load_tracking
        or args.enable_per_request_metrics
    ):
        return None
    metrics = HttpMetrics(app)
    if not metrics.observers:
        logger.warning("vLLM's HTTP metrics were not found: streams use vLLM's own path, which costs more CPU time")
        return None
    keep_parser_parts()
    processor, stats = engine_client.output_processor, StreamStats(engine_client.logger_manager)
    tokenizer = processor.tokenizer
    pieces = None if tokenizer is None else TokenPieces(tokenizer)
    tools = StreamTools(processor, stats, texts_of(tokenizer), float(args.sse_keep_alive_interval), pieces)
    makers: dict[str, tuple[str, Callable[[Any, Any], FastRoute]]] = {
        COMPLETIONS: ("openai_serving_completion", completion_route),
        CHAT: ("openai_serving_chat", chat_route),
    }
    if not ENDS_OF_AGENTS_APIS.is_here:
        makers[MESSAGES] = "anthropic_serving_messages", message_route
        makers[RESPONSES] = "openai_serving_responses", response_route
    served = {path: (getattr(state, name, None), make) for path, (name, make) in makers.items()}
    routes = {path: make(serving, engine_client) for path, (serving, make) in served.items() if serving is not None}
    return FastPath(app, routes, tools, metrics)


def is_fast_completion(request: Any) -> bool:
    """True if the fast path can write this completion's chunks: those of one prompt."""
    prompt = request.prompt
    return (
        (isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)))
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


def is_fast_response(request: Any, serving: Any) -> bool:
    """True if the fast path can write this response's events."""
    return bool(request.stream) and not (
        request.background
        or (request.store and serving.enable_store)
        or request.enable_response_messages
        or request.is_include_output_logprobs()
    )


class PreparingClient:
    """Replacement for a serving object's engine client: ``generate`` yields no output, but the call to begin it.

    vLLM passes what ``generate`` returns to the function that makes the stream; here, that puts it into its plan.
    """

    def __init__(self, engine_client: Any) -> None:
        self._engine_client = engine_client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine_client, name)

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **more: Any) -> Adding:
        yield partial(self._engine_client.add_request, request_id, prompt, sampling_params, **more)


def completion_route(serving: Any, engine_client: Any) -> FastRoute:
    """Return the route of completions: a copy of vLLM's ``serving`` object returns a plan instead of a stream."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    def plan(
        request: Any, _inputs: Any, results: Any, request_id: str, created: int, model: str, **_: Any
    ) -> StreamPlan:
        usage, usage_each = should_include_usage(request.stream_options, serving.enable_force_include_usage)
        n, token_ids = request.n or 1, bool(request.return_token_ids)
        chunks = ChunkWriter(installed(COMPLETION_FORMAT), request_id, created, model)
        # vLLM has merged the results of all prompts: with the number of the prompt, which is the only one here.
        adding = (add_request async for _prompt, add_request in results)
        return StreamPlan(
            serving, ChunkAnswer(serving, chunks, None, n, usage, usage_each, token_ids), adding, is_chat=False, n=n,
            usage_each=usage_each, token_ids=token_ids, fingerprint=None if usage else serving.system_fingerprint,
            logprobs=None if request.logprobs is None else _logprobs(serving, request, request.logprobs),
        )  # fmt: skip

    preparing = copy.copy(serving)
    preparing.engine_client, preparing.completion_stream_generator = PreparingClient(engine_client), plan
    return FastRoute(CompletionRequest, is_fast_completion, preparing.create_completion)


def chat_route(serving: Any, engine_client: Any) -> FastRoute:
    """Return the route of chat answers: a copy of vLLM's ``serving`` object returns a plan instead of a stream."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    def plan(
        request: Any, adding: Adding, request_id: str, model: str, make_parser: Callable[[], Any], media_tokens: Any
    ) -> StreamPlan:
        usage, usage_each = should_include_usage(request.stream_options, serving.enable_force_include_usage)
        n, token_ids = request.n or 1, bool(request.return_token_ids)
        # vLLM 0.31 accepts ``top_logprobs`` null, and sends no log probabilities then.
        wants_logprobs = request.logprobs and (request.top_logprobs is not None or request.logprob_token_ids)
        events = ChunkAnswer(
            serving, ChunkWriter(installed(CHAT_FORMAT), request_id, int(time.time()), model),
            serving.get_chat_request_role(request), n, usage, usage_each, token_ids, bool(request.return_prompt_text),
            media_tokens,
        )  # fmt: skip
        return StreamPlan(
            serving, events, adding, is_chat=True, n=n, usage_each=usage_each, token_ids=token_ids,
            logprobs=_logprobs(serving, request, request.top_logprobs) if wants_logprobs else None,
            parsing=chat_parsing(serving, request, make_parser, usage=usage),
            fingerprint=None if usage else serving.system_fingerprint,
        )  # fmt: skip

    preparing = _preparing_chat(serving, engine_client, plan)
    return FastRoute(ChatCompletionRequest, is_fast_chat, preparing.create_chat_completion)


def message_route(serving: Any, engine_client: Any) -> FastRoute:
    """Return the route of Messages, which vLLM converts from a chat answer."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest

    # ``request`` is the chat request into which vLLM has converted a message's; its usage has no count of media tokens.
    def plan(
        request: Any, adding: Adding, request_id: str, model: str, make_parser: Callable[[], Any], _media: Any
    ) -> StreamPlan:
        parsing = chat_parsing(serving, request, make_parser, usage=False)
        return StreamPlan(serving, MessageAnswer(serving, request_id, model), adding, is_chat=True, parsing=parsing)

    preparing = _preparing_chat(serving, engine_client, plan)
    preparing.message_stream_converter = lambda prepared: prepared
    return FastRoute(AnthropicMessagesRequest, lambda request: bool(request.stream), preparing.create_messages)


def _preparing_chat(serving: Any, engine_client: Any, plan: Callable[..., StreamPlan]) -> Any:
    """Return a copy of a serving object that returns a plan instead of a chat stream."""

    def planned(
        request: Any, results: Any, request_id: str, model: str, _conversation: Any, tokenizer: Any, _metadata: Any,
        chat_template_kwargs: Any = None, mm_token_counts: Any = None,
    ) -> StreamPlan:  # fmt: skip
        # The parser that vLLM made to read the prompt serves the first choice: it has the same arguments, and reading a
        # prompt does not change a parser.
        first = [parser] if (parser := current().parser) is not None else []

        def make() -> Any:
            return first.pop() if first else serving._make_parser(request, tokenizer, chat_template_kwargs)

        return plan(request, results, request_id, model, make, mm_token_counts)

    def make_parser(*args: Any) -> Any:
        made = current().parser = serving._make_parser(*args)
        return made

    preparing = copy.copy(serving)
    preparing.engine_client, preparing.chat_completion_stream_generator = PreparingClient(engine_client), planned
    preparing._make_parser = make_parser
    return preparing


def chat_parsing(serving: Any, request: Any, make: Callable[[], Any], *, usage: bool) -> Parsing | None:
    """Return the parsing of a chat answer by parsers that ``make`` returns; None if vLLM has no parser for it."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionNamedToolChoiceParam

    if serving.parser_cls is None:
        return None
    choice = request.tool_choice
    is_named = isinstance(choice, ChatCompletionNamedToolChoiceParam) and bool(choice.function.name)
    return Parsing(
        request, make, is_named, one_call_only=request.parallel_tool_calls is False,
        hides_reasoning=not request.include_reasoning, keeps_tool_calls=keeps_tool_calls(serving, request),
        counts=usage and counts_reasoning(serving),
    )  # fmt: skip


def _logprobs(serving: Any, request: Any, top: int | None) -> Logprobs:
    asked = request.return_tokens_as_token_ids
    as_token_ids = serving.return_tokens_as_token_ids if asked is None else asked
    return Logprobs(top, request.logprob_token_ids, asked, bool(as_token_ids or request.logprob_token_ids))


def response_route(serving: Any, engine_client: Any) -> FastRoute:
    """Return the route of Responses; vLLM serves the requests that use the server's tools."""
    from vllm.entrypoints.openai.responses.context import SimpleContext
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    preparing, client = copy.copy(serving), PreparingClient(engine_client)

    def generate(
        request_id: str, engine_input: Any, sampling_params: Any, context: Any, tok_params: Any = None,
        max_tool_calls: int | None = None, **more: Any,
    ) -> Adding:  # fmt: skip
        del context, tok_params, max_tool_calls  # only tools that the server calls need these
        first = f"{request_id}_0"
        preparing._log_inputs(first, engine_input, params=sampling_params, lora_request=more.get("lora_request"))
        return client.generate(engine_input, sampling_params, first, **more)

    def plan(
        request: Any, sampling_params: Any, results: Any, context: Any, model: str, tokenizer: Any, metadata: Any
    ) -> StreamPlan | None:
        if type(context) is not SimpleContext:
            return None  # only vLLM can make items from another kind of context
        task = ResponseTask(request, sampling_params, context, model, tokenizer, metadata, int(time.time()))
        parsing = None
        if context.response_parser is not None:
            parsing = Parsing(
                request, lambda: context.response_parser, is_named=False,
                one_call_only=request.parallel_tool_calls is False, hides_reasoning=not request.include_reasoning,
                keeps_tool_calls=True, counts=True,
            )  # fmt: skip
        answer = ResponseAnswer(serving, task)
        return StreamPlan(serving, answer, results, is_chat=True, parsing=parsing, emits_empty_outputs=True)

    preparing.engine_client, preparing._generate_with_builtin_tools = client, generate
    preparing.responses_stream_generator = plan
    return FastRoute(ResponsesRequest, partial(is_fast_response, serving=serving), preparing.create_responses)
