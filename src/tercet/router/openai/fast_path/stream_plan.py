"""Plan of an answer before it is streamed: the format of its events, its parser, and the fields of its chunks.

Relies on ``should_include_usage`` returning whether usage is sent at the end, and whether with each chunk; and on a
serving object's ``_make_parser`` making a parser for one choice.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from vllm.entrypoints.serve.utils.api_utils import should_include_usage

from tercet.protocol.errors import MESSAGES
from tercet.protocol.headers import CHAT, COMPLETIONS, RESPONSES
from tercet.router.openai.fast_path.agent_answers import MessageAnswer, ResponseAnswer, ResponseTask
from tercet.router.openai.fast_path.logprob_chunks import TokenTexts
from tercet.router.openai.fast_path.sse_chunks import (
    AnswerEvents,
    ChunkAnswer,
    ChunkWriter,
    chat_format,
    completion_format,
    counts_reasoning,
)
from tercet.router.openai.fast_path.stream_metrics import StreamStats
from tercet.vllm_plugin.differences import ENDS_OF_AGENTS_APIS, OFFSETS_OF_SENT_TEXT, SILENT_ENDS, keeps_tool_calls
from tercet.wire.serving.server_access import current

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import OutputProcessor


@dataclass(frozen=True)
class StreamTools:
    """Common parts of all streams: vLLM's output processor, token counters, and the texts of tokens."""

    processor: OutputProcessor
    stats: StreamStats
    texts: TokenTexts | None
    #: Seconds without a chunk after which a comment is sent; 0: never.
    keep_alive: float = 0.0


@dataclass(frozen=True)
class Logprobs:
    """The log probabilities that a request asks for."""

    #: How many of each token; -1: all, None: none of them.
    top: int | None
    token_ids: list[int] | None
    as_token_ids: bool | None
    #: The answer needs more than each token's text and value, so vLLM's serving object makes it.
    in_words: bool


@dataclass(frozen=True)
class Parsing:
    """Parsing of an answer."""

    request: Any
    #: Makes one parser per choice, which reads its options in the request.
    make: Callable[[], Any]
    #: The request names the tool to call.
    is_named: bool
    one_call_only: bool
    hides_reasoning: bool
    keeps_tool_calls: bool
    #: The tokens are kept, since usage has the number of reasoning tokens.
    counts: bool


@dataclass
class Parsers:
    """The parsers of a chat answer's choices. ``first`` is one that vLLM made to read the prompt; None: it made none.

    It has the same arguments as the parsers of the choices, and reading a prompt does not change a parser.
    """

    serving: Any
    request: Any
    tokenizer: Any
    template_kwargs: Any
    first: Any = None

    def make(self) -> Any:
        """Return the parser of the next choice."""
        made, self.first = self.first, None
        return self.serving._make_parser(self.request, self.tokenizer, self.template_kwargs) if made is None else made


@dataclass(frozen=True)
class StreamPlan:
    """Plan for one answer, which ``events`` write and vLLM's object ``serving`` prepared."""

    serving: Any
    events: AnswerEvents
    #: A parser may read its text.
    is_chat: bool
    n: int = 1
    #: What the client asked for in each chunk.
    usage_each: bool = False
    token_ids: bool = False
    logprobs: Logprobs | None = None
    parsing: Parsing | None = None
    #: The system's, in the last chunk.
    fingerprint: str | None = None
    #: An output without text and tokens is handled like any other, even if it is the first.
    hears_silence: bool = False

    @property
    def is_plain(self) -> bool:
        """True if the events differ only in their text."""
        return not (self.usage_each or self.token_ids) and self.logprobs is None and self.parsing is None

    def is_silent(self, *, finished: bool) -> bool:
        """True if no event is sent for a result without text and tokens, after no earlier text or token."""
        return not self.hears_silence and (not finished or SILENT_ENDS.is_here)


def completion_plan(serving: Any, request: Any, chunks: ChunkWriter) -> StreamPlan:
    """Return the plan for one prompt's completions."""
    usage, usage_each = should_include_usage(request.stream_options, serving.enable_force_include_usage)
    n, token_ids = request.n or 1, bool(request.return_token_ids)
    return StreamPlan(
        serving, ChunkAnswer(serving, chunks, None, n, usage, usage_each, token_ids), is_chat=False, n=n,
        usage_each=usage_each, token_ids=token_ids, fingerprint=None if usage else serving.system_fingerprint,
        logprobs=None if request.logprobs is None else _logprobs(serving, request, request.logprobs),
    )  # fmt: skip


def chat_plan(
    serving: Any, request: Any, chunks: ChunkWriter, parsers: Parsers, multimodal_tokens: Mapping[str, int] | None
) -> StreamPlan:
    """Return the plan for chat answers."""
    usage, usage_each = should_include_usage(request.stream_options, serving.enable_force_include_usage)
    n, token_ids = request.n or 1, bool(request.return_token_ids)
    events = ChunkAnswer(
        serving, chunks, serving.get_chat_request_role(request), n, usage, usage_each, token_ids,
        bool(request.return_prompt_text), multimodal_tokens,
    )  # fmt: skip
    return StreamPlan(
        serving, events, is_chat=True, n=n, usage_each=usage_each, token_ids=token_ids,
        # vLLM 0.31 accepts ``top_logprobs`` null, and sends no log probabilities then.
        logprobs=_logprobs(serving, request, request.top_logprobs)
        if request.logprobs and (request.top_logprobs is not None or request.logprob_token_ids)
        else None,
        parsing=chat_parsing(serving, request, parsers, usage=usage),
        fingerprint=None if usage else serving.system_fingerprint,
    )  # fmt: skip


def message_plan(serving: Any, request: Any, message_id: str, model: str, parsers: Parsers) -> StreamPlan:
    """Return the plan for a message; ``request`` is the chat request into which vLLM has converted it."""
    return StreamPlan(
        serving, MessageAnswer(serving, message_id, model), is_chat=True,
        parsing=chat_parsing(serving, request, parsers, usage=False),
    )  # fmt: skip


def response_plan(
    serving: Any, request: Any, sampling_params: Any, context: Any, model: str, tokenizer: Any, metadata: Any
) -> StreamPlan | None:
    """Return the plan for a response; None if only vLLM can make items from this kind of ``context``."""
    from vllm.entrypoints.openai.responses.context import SimpleContext

    if type(context) is not SimpleContext:
        return None
    task = ResponseTask(request, sampling_params, context, model, tokenizer, metadata, int(time.time()))
    parsing = None
    if context.response_parser is not None:
        parsing = Parsing(
            request, lambda: context.response_parser, is_named=False,
            one_call_only=request.parallel_tool_calls is False, hides_reasoning=not request.include_reasoning,
            keeps_tool_calls=True, counts=True,
        )  # fmt: skip
    return StreamPlan(serving, ResponseAnswer(serving, task), is_chat=True, parsing=parsing, hears_silence=True)


def _logprobs(serving: Any, request: Any, top: int | None) -> Logprobs:
    asked = request.return_tokens_as_token_ids
    as_token_ids = serving.return_tokens_as_token_ids if asked is None else asked
    return Logprobs(top, request.logprob_token_ids, asked, bool(as_token_ids or request.logprob_token_ids))


def chat_parsing(serving: Any, request: Any, parsers: Parsers, *, usage: bool) -> Parsing | None:
    """Return the parsing of a chat answer; None if vLLM has no parser for it."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionNamedToolChoiceParam

    if serving.parser_cls is None:
        return None
    choice = request.tool_choice
    is_named = isinstance(choice, ChatCompletionNamedToolChoiceParam) and bool(choice.function.name)
    return Parsing(
        request, parsers.make, is_named, one_call_only=request.parallel_tool_calls is False,
        hides_reasoning=not request.include_reasoning, keeps_tool_calls=keeps_tool_calls(serving, request),
        counts=usage and counts_reasoning(serving),
    )  # fmt: skip


# ---- routes ----------------------------------------------------------------------------------------------------------

# The routes of the fast path: vLLM's serving objects prepare a request, and stop before they generate.
#
# Relies on ``create_completion``, ``create_chat_completion``, ``create_messages`` and ``create_responses`` of serving
# objects rendering and validating a request before they return its stream. They make the stream with
# ``completion_stream_generator``, ``chat_completion_stream_generator`` and ``responses_stream_generator`` from the
# result of ``engine_client.generate``. Chat makes a parser with ``_make_parser``, whose ``is_reasoning_end`` it calls
# with the prompt, and then one with the same arguments for each choice. Messages also passes the chat stream through
# ``message_stream_converter``; Responses uses the result of ``_generate_with_builtin_tools``.


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
