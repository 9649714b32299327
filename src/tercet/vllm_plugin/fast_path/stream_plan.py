"""Plan of an answer before it is streamed: the format of its events, its parser, and the fields of its chunks.

Relies on ``should_include_usage`` returning whether usage is sent at the end, and whether with each chunk; and on a
serving object's ``_make_parser`` making a parser for one choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.serve.utils.api_utils import should_include_usage

from tercet.vllm_plugin.differences import SILENT_ENDS, keeps_tool_calls
from tercet.vllm_plugin.fast_path.answer_events import AnswerEvents
from tercet.vllm_plugin.fast_path.chunk_answers import ChunkAnswer, counts_reasoning
from tercet.vllm_plugin.fast_path.message_answers import MessageAnswer
from tercet.vllm_plugin.fast_path.response_answers import ResponseAnswer, ResponseTask
from tercet.vllm_plugin.fast_path.sse_chunks import ChunkWriter
from tercet.vllm_plugin.fast_path.stream_metrics import StreamStats
from tercet.vllm_plugin.fast_path.token_texts import TokenTexts

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import OutputProcessor


@dataclass(frozen=True)
class StreamTools:
    """Common parts of all streams: vLLM's output processor, token counters, and the texts of tokens.

    ``keep_alive`` is the time in seconds without a chunk after which a comment is sent; 0: never.
    """

    processor: OutputProcessor
    stats: StreamStats
    texts: TokenTexts | None
    keep_alive: float = 0.0


@dataclass(frozen=True)
class Logprobs:
    """The log probabilities that a request asks for: the ``top`` ones of each token; -1: all, None: none of them.

    ``in_words``: the answer needs more than each token's text and value, so vLLM's serving object makes it.
    """

    top: int | None
    token_ids: list[int] | None
    as_token_ids: bool | None
    in_words: bool


@dataclass(frozen=True)
class Parsing:
    """Parsing of an answer: ``make`` makes one parser per choice, which reads its options in ``request``.

    ``is_named``: the request names the tool to call. ``counts``: the tokens are kept, since usage has the number of
    reasoning tokens.
    """

    request: Any
    make: Callable[[], Any]
    is_named: bool
    one_call_only: bool
    hides_reasoning: bool
    keeps_tool_calls: bool
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
    """Plan for one answer, which ``events`` write and vLLM's object ``serving`` prepared.

    ``is_chat``: a parser may read its text. The client asked for ``usage_each``, ``token_ids`` and ``logprobs`` in each
    chunk; the last chunk has ``fingerprint``. ``hears_silence``: an output without text and tokens is handled like any
    other, even if it is the first.
    """

    serving: Any
    events: AnswerEvents
    is_chat: bool
    n: int = 1
    usage_each: bool = False
    token_ids: bool = False
    logprobs: Logprobs | None = None
    parsing: Parsing | None = None
    fingerprint: str | None = None
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
    serving: Any,
    request: Any,
    chunks: ChunkWriter,
    parsers: Parsers,
    multimodal_tokens: Mapping[str, int] | None,
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
        request,
        parsers.make,
        is_named,
        request.parallel_tool_calls is False,
        not request.include_reasoning,
        keeps_tool_calls(serving, request),
        usage and counts_reasoning(serving),
    )
