"""What is known of an answer before it is streamed: how its chunks look, and by which parser they are made.

Relies on ``should_include_usage`` telling whether usage is sent at the end, and with each chunk; and on a serving
object's ``_make_parser`` making a parser for one choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.serve.utils.api_utils import should_include_usage

from tercet.vllm_plugin.differences import keeps_tool_calls
from tercet.vllm_plugin.fast_path.sse_chunks import ChunkWriter
from tercet.vllm_plugin.fast_path.stream_metrics import StreamStats
from tercet.vllm_plugin.fast_path.token_texts import TokenTexts

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import OutputProcessor


@dataclass(frozen=True)
class StreamTools:
    """Common parts of streams: vLLM's output processor, token counters, and the texts of tokens.

    ``keep_alive`` is after how many seconds without a chunk a comment is sent; 0: never.
    """

    processor: OutputProcessor
    stats: StreamStats
    texts: TokenTexts | None
    keep_alive: float = 0.0


@dataclass(frozen=True)
class Logprobs:
    """Log probabilities of a request: ``top`` of each token, all of them for -1, none of them for None.

    ``in_words``: they differ from a token's text and value, so that vLLM's serving object makes them.
    """

    top: int | None
    token_ids: list[int] | None
    as_token_ids: bool | None
    in_words: bool


@dataclass(frozen=True)
class Parsing:
    """How a chat answer is parsed: one parser per choice, made by ``make``; ``request`` is what it goes by."""

    request: Any
    make: Callable[[], Any]
    is_named: bool
    one_call_only: bool
    hides_reasoning: bool
    keeps_tool_calls: bool


@dataclass(frozen=True)
class StreamPlan:
    """How to write one answer: ``serving`` is vLLM's object that prepared it.

    ``role`` is that of a chat answer, None for a completion. ``usage`` tells whether the client asked for a count at
    the end, ``usage_each`` for one in each chunk.
    """

    serving: Any
    chunks: ChunkWriter
    role: str | None
    n: int
    usage: bool
    usage_each: bool
    token_ids: bool
    prompt_text: bool = False
    logprobs: Logprobs | None = None
    parsing: Parsing | None = None
    multimodal_tokens: Mapping[str, int] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether its chunks differ only in their text."""
        return not (self.usage_each or self.token_ids) and self.logprobs is None and self.parsing is None

    @property
    def counts_reasoning(self) -> bool:
        """Whether usage tells how many tokens were reasoning."""
        return self.role is not None and bool(self.serving._include_reasoning_tokens_details)


def completion_plan(serving: Any, request: Any, chunks: ChunkWriter) -> StreamPlan:
    """The plan for one prompt's completions."""
    usage, usage_each = should_include_usage(request.stream_options, serving.enable_force_include_usage)
    logprobs = None if request.logprobs is None else _logprobs(serving, request, request.logprobs)
    return StreamPlan(
        serving, chunks, None, request.n or 1, usage, usage_each, bool(request.return_token_ids), logprobs=logprobs
    )


def chat_plan(
    serving: Any,
    request: Any,
    chunks: ChunkWriter,
    tokenizer: Any,
    template_kwargs: Any,
    multimodal_tokens: Mapping[str, int] | None,
) -> StreamPlan:
    """The plan for chat answers."""
    usage, usage_each = should_include_usage(request.stream_options, serving.enable_force_include_usage)
    return StreamPlan(
        serving, chunks, serving.get_chat_request_role(request), request.n or 1, usage, usage_each,
        bool(request.return_token_ids), bool(request.return_prompt_text),
        # vLLM 0.31 has a request for no top ones, which gets no log probabilities at all.
        _logprobs(serving, request, request.top_logprobs)
        if request.logprobs and (request.top_logprobs is not None or request.logprob_token_ids)
        else None,
        None if serving.parser_cls is None else _parsing(serving, request, tokenizer, template_kwargs),
        multimodal_tokens,
    )  # fmt: skip


def _logprobs(serving: Any, request: Any, top: int | None) -> Logprobs:
    asked = request.return_tokens_as_token_ids
    as_token_ids = serving.return_tokens_as_token_ids if asked is None else asked
    return Logprobs(top, request.logprob_token_ids, asked, bool(as_token_ids or request.logprob_token_ids))


def _parsing(serving: Any, request: Any, tokenizer: Any, template_kwargs: Any) -> Parsing:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionNamedToolChoiceParam

    choice = request.tool_choice
    is_named = isinstance(choice, ChatCompletionNamedToolChoiceParam) and bool(choice.function.name)
    return Parsing(
        request,
        lambda: serving._make_parser(request, tokenizer, template_kwargs),
        is_named,
        request.parallel_tool_calls is False,
        not request.include_reasoning,
        keeps_tool_calls(serving, request),
    )
