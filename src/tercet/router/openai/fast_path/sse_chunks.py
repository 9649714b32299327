"""The events of streams, byte-identical to those of vLLM's stream generators, written without an object for each.

Here are the interface that the answers of all APIs have, and the chunks of OpenAI's completions and chat, with usage at
the end and ``[DONE]``; Anthropic's and Responses' events are in :mod:`.agent_answers`.

Relies on serving objects making the events of errors with ``create_streaming_error_response`` and
``_convert_generation_error_to_streaming_response``; on the fields of ``CompletionStreamResponse`` and
``ChatCompletionStreamResponse`` that the generators set, since a chunk has only these, and on their order; also on the
fields of ``DeltaMessage`` and ``UsageInfo``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.exceptions import GenerationError
from vllm.outputs import RequestOutput

from tercet.router.openai.program_client import SequenceFailed
from tercet.vllm_plugin.differences import CHUNKS_WITHOUT_TRANSFER
from tercet.wire.serving.answers import with_named_code

if TYPE_CHECKING:
    from tercet.router.openai.fast_path.request_stream import ChoiceStream

DONE = b"data: [DONE]\n\n"
NULL = b"null"


class Extras(NamedTuple):
    """The fields of a chunk in addition to its text, each as JSON; ``usage`` is empty if the chunk has no usage."""

    logprobs: bytes = NULL
    token_ids: bytes = NULL
    prompt_token_ids: bytes = NULL
    usage: bytes = b""


NO_EXTRAS = Extras()


class ChoiceEvents(Protocol):
    """The events of one choice. A *delta* is the part of an event that differs from output to output.

    ``empty`` is that of no text. A *framed* event is one chunk of HTTP/1.1's chunked encoding; empty if there is none.
    """

    empty: bytes

    #: The event with ``text`` and nothing else, framed: the shortest way, for plain text.
    def text(self, text: str) -> bytes: ...

    #: The deltas of text, of reasoning, and of more arguments of the call with this index.
    def text_delta(self, text: str) -> bytes: ...
    def reasoning_delta(self, text: str) -> bytes: ...
    def arguments_delta(self, call: int, text: str) -> bytes: ...

    #: The delta of what a parser made; raises vLLM's exception if it cannot be written.
    def parsed_delta(self, delta: Any) -> bytes: ...

    #: The event with a delta and at most log probabilities, framed.
    def frame(self, delta: bytes, logprobs: bytes = NULL, /) -> bytes: ...

    #: The event with a delta and the other fields that the client asked for, not framed.
    def event(self, delta: bytes, extras: Extras, /) -> bytes: ...

    #: The last event of the choice, not framed.
    def last(
        self, delta: bytes, finish_reason: str, stop_reason: int | str | None, fingerprint: str | None, extras: Extras,
        /,
    ) -> bytes: ...  # fmt: skip


class AnswerEvents(Protocol):
    """The events of one answer, none of them framed. ``keeps_alive``: True if a silent stream gets comments."""

    keeps_alive: bool

    #: The events of the choice with this index.
    def choice(self, index: int, /) -> ChoiceEvents: ...

    #: The events before any output, and those before the event of a result of vLLM's output processor.
    def begin(self) -> bytes: ...
    def result(self, result: Any) -> bytes: ...

    #: The events after all choices, and those of an error instead.
    async def end(self, choices: Sequence[ChoiceStream]) -> bytes: ...
    def failed(self, error: Exception) -> bytes: ...


# ---- deltas of parsers, as JSON -----------------------------------------------------------------------------------

CONTENT, REASONING = {"content"}, {"reasoning"}
CALLS, CALLS_BESIDE_CONTENT = {"tool_calls"}, {"content", "tool_calls"}
MORE_OF_CALL, ARGUMENTS = {"index", "function"}, {"arguments"}
encode = msgspec.json.Encoder().encode


def delta_json(delta: Any) -> bytes:
    """Return a parser's delta as JSON, as vLLM writes it; raises vLLM's exception if the delta cannot be written."""
    try:
        written = _usual_json(delta)
    except UnicodeEncodeError:  # half of a character, from an escape that an output has cut
        written = None
    return delta.model_dump_json(exclude_unset=True).encode() if written is None else written


def _usual_json(delta: Any) -> bytes | None:
    """Return the JSON of a delta with text, or with more arguments of a call; None for other deltas, which are rare."""
    if type(delta) is not DeltaMessage:
        return None
    fields = delta.model_fields_set
    if fields == CONTENT:
        return b'{"content":%b}' % encode(delta.content)
    if fields == REASONING:
        return b'{"reasoning":%b}' % encode(delta.reasoning)
    if fields not in (CALLS, CALLS_BESIDE_CONTENT) or len(delta.tool_calls) != 1:
        return None
    call: Any = delta.tool_calls[0]
    function = call.function
    if type(call) is not DeltaToolCall or call.model_fields_set != MORE_OF_CALL:
        return None
    if type(function) is not DeltaFunctionCall or function.model_fields_set != ARGUMENTS:
        return None
    content = b"" if fields == CALLS else b'"content":%b,' % encode(delta.content)
    more = b'{"index":%d,"function":{"arguments":%b}}' % (call.index, encode(function.arguments))
    return b'{%b"tool_calls":[%b]}' % (content, more)


# ---- chunks --------------------------------------------------------------------------------------------------------

#   A framed chunk of a chat answer. All of it but the size and the delta is constant: the writer of a choice makes the
#   rest once, so that a token costs a look-up of its text, one encoding and one formatting of bytes.
#
#    size     before (head and opening)                       delta               after (closing and ending)
#   +--------+-----------------------------------------------+-------------------+-----------------------------------+
#   | a3\r\n | data: {"id":..,"choices":[{"index":0,"delta": | {"content":" it"} | ,"logprobs":null,..}]}\n\n\r\n     |
#   +--------+-----------------------------------------------+-------------------+-----------------------------------+
#
#   Log probabilities and token ids stand inside ``closing``, usage between ``closing`` and ``ending``.


@dataclass(frozen=True)
class ChunkFormat:
    """Format of one route's chunks."""

    object: bytes
    #: Before a choice's text or delta, and after it; ``last_closing`` ends a choice.
    opening: bytes
    #: Around a text: together they are its delta.
    around_text: tuple[bytes, bytes]
    closing: bytes
    last_closing: bytes
    #: The end of every chunk with a choice.
    ending: bytes

    @cached_property
    def around_logprobs(self) -> tuple[bytes, bytes]:
        """The parts of a chunk before and after its log probabilities, for chunks without token ids."""
        until, _, beyond = self.closing.partition(b"%(logprobs)b")
        return until, (beyond % {b"ids": NULL, b"prompt": NULL}) + self.ending + b"}\n\n"


COMPLETION_FORMAT = ChunkFormat(
    object=b"text_completion",
    opening=b'{"index":%d,"text":',
    around_text=(b"", b""),
    closing=b',"logprobs":%(logprobs)b,"finish_reason":null,"stop_reason":null,"prompt_token_ids":%(prompt)b,'
    b'"token_ids":%(ids)b,"weight_versions":null}]',
    last_closing=b',"logprobs":%(logprobs)b,"finish_reason":%(reason)b,"stop_reason":%(stop)b,'
    b'"prompt_token_ids":%(prompt)b,"token_ids":%(ids)b,"weight_versions":null}]',
    ending=b',"kv_transfer_params":null',
)
CHAT_FORMAT = ChunkFormat(
    object=b"chat.completion.chunk",
    opening=b'{"index":%d,"delta":',
    around_text=(b'{"content":', b"}"),
    closing=b',"logprobs":%(logprobs)b,"finish_reason":null,"token_ids":%(ids)b}]',
    last_closing=b',"logprobs":%(logprobs)b,"finish_reason":%(reason)b,"stop_reason":%(stop)b,"token_ids":%(ids)b,'
    b'"weight_versions":null}]',
    ending=b',"kv_transfer_params":null',
)


@cache
def installed(form: ChunkFormat) -> ChunkFormat:
    """Return the format of :data:`COMPLETION_FORMAT` or :data:`CHAT_FORMAT` in the installed vLLM."""
    if not CHUNKS_WITHOUT_TRANSFER.is_here:
        return form
    closing, last_closing = (
        part.replace(b',"weight_versions":null', b"") for part in (form.closing, form.last_closing)
    )
    return replace(form, closing=closing, last_closing=last_closing, ending=b"")


class ChunkWriter:
    """Writer of the chunks of one stream that belong to all of its choices; each is a whole event."""

    def __init__(self, form: ChunkFormat, request_id: str, created: int, model: str) -> None:
        self.form = form
        self.head = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[' % (
            encode(request_id), form.object, created, encode(model)
        )  # fmt: skip

    def choice(self, index: int) -> ChoiceChunks:
        return ChoiceChunks(self.form, self.head, index)

    def role(
        self, role: str, index: int = 0, prompt: Sequence[int] | None = None, text: str | None = None,
        usage: bytes = b"",
    ) -> bytes:  # fmt: skip
        """Return the chunk before a chat answer's text.

        ``prompt`` and ``text`` are the prompt's tokens and text, None if the client did not ask for them; ``usage`` is
        the field made by :func:`usage_of`, or empty.
        """
        choice = b'{"index":%d,"delta":{"role":%b,"content":""},"logprobs":null,"finish_reason":null}]%b' % (
            index, encode(role), usage
        )  # fmt: skip
        return b'%b%b,"prompt_token_ids":%b,"prompt_text":%b}\n\n' % (self.head, choice, encode(prompt), encode(text))

    def usage(self, counts: Mapping[str, Any], fingerprint: str | None) -> bytes:
        """Return the chunk with the counts that are known, at the end of the stream."""
        known = {name: count for name, count in counts.items() if count is not None}
        return b'%b],"usage":%b%b' % (self.head, encode(known), _end(fingerprint))


class ChoiceChunks:
    """Writer of one choice's chunks: see :class:`ChoiceEvents`."""

    empty = b"{}"

    def __init__(self, form: ChunkFormat, head: bytes, index: int) -> None:
        self._form = form
        self._before = head + form.opening % index
        until, ending = self._around_logprobs = form.around_logprobs
        self._after = until + NULL + ending
        # The constant parts of a chunk with a text only, and the sizes of the constant parts of each kind of chunk.
        self._text_before, self._text_after = self._before + form.around_text[0], form.around_text[1] + self._after
        self._text_size = len(self._text_before) + len(self._text_after)
        self._size = len(self._before) + len(self._after)
        self._logprobs_size = len(self._before) + len(until) + len(ending)

    def text(self, text: str) -> bytes:
        encoded = encode(text)
        return b"%x\r\n%b%b%b\r\n" % (self._text_size + len(encoded), self._text_before, encoded, self._text_after)

    def text_delta(self, text: str) -> bytes:
        before, after = self._form.around_text
        return before + encode(text) + after

    def reasoning_delta(self, text: str) -> bytes:
        return b'{"reasoning":%b}' % encode(text)

    def arguments_delta(self, call: int, text: str) -> bytes:
        return b'{"content":null,"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (call, encode(text))

    def parsed_delta(self, delta: Any) -> bytes:
        return delta_json(delta)

    def frame(self, delta: bytes, logprobs: bytes = NULL) -> bytes:
        if logprobs is NULL:
            return b"%x\r\n%b%b%b\r\n" % (self._size + len(delta), self._before, delta, self._after)
        until, ending = self._around_logprobs
        size = self._logprobs_size + len(delta) + len(logprobs)
        return b"%x\r\n%b%b%b%b%b\r\n" % (size, self._before, delta, until, logprobs, ending)

    def event(self, delta: bytes, extras: Extras) -> bytes:
        closing = self._form.closing % _values(extras)
        return b"%b%b%b%b%b}\n\n" % (self._before, delta, closing, extras.usage, self._form.ending)

    def last(
        self, delta: bytes, finish_reason: str, stop_reason: int | str | None, fingerprint: str | None,
        extras: Extras = NO_EXTRAS,
    ) -> bytes:  # fmt: skip
        """Return the chunk that ends the choice; ``fingerprint`` is the system's, None if usage follows."""
        values = {**_values(extras), b"reason": encode(finish_reason), b"stop": encode(stop_reason)}
        closing = self._form.last_closing % values + extras.usage
        return self._before + delta + closing + _end(fingerprint, self._form.ending)


def usage_of(prompt: int, completion: int, reasoning: int | None, *, is_chat: bool) -> bytes:
    """Return a chunk's field ``usage``, for the tokens so far; ``reasoning`` is None if they are not counted."""
    counts = _token_counts(prompt, completion)
    if is_chat:
        counts["completion_tokens_details"] = None if reasoning is None else {"reasoning_tokens": reasoning}
    return b',"usage":' + encode(counts)


def framed(event: bytes) -> bytes:
    """Return an event as one chunk of HTTP/1.1's chunked encoding."""
    return b"%x\r\n%b\r\n" % (len(event), event)


def _values(extras: Extras) -> dict[bytes, bytes]:
    return {b"logprobs": extras.logprobs, b"ids": extras.token_ids, b"prompt": extras.prompt_token_ids}


def _end(fingerprint: str | None, ending: bytes = b"") -> bytes:
    own = b"" if fingerprint is None else b',"system_fingerprint":%b' % encode(fingerprint)
    return b"%b%b}\n\n" % (own, ending)


# ---- whole answers ---------------------------------------------------------------------------------------------------


@dataclass
class ChunkAnswer:
    """One answer, which vLLM's object ``serving`` prepared."""

    serving: Any
    chunks: ChunkWriter
    #: The role of a chat answer, None for a completion.
    role: str | None
    n: int
    #: The client asked for usage at the end, or in each chunk.
    usage: bool
    usage_each: bool
    #: The first chunk has the prompt's tokens, its text.
    prompt_ids: bool
    prompt_text: bool = False
    multimodal_tokens: Mapping[str, int] | None = None
    keeps_alive: bool = True
    _first: RequestOutput | None = None

    def choice(self, index: int) -> ChoiceChunks:
        return self.chunks.choice(index)

    def begin(self) -> bytes:
        return b""

    def result(self, result: RequestOutput) -> bytes:
        """Return the chunks with the role of each choice of a chat answer, at the first result of any choice."""
        if self._first is not None:
            return b""
        self._first = result
        if self.role is None:
            return b""
        prompt = result.prompt_token_ids if self.prompt_ids else None
        text = result.prompt if self.prompt_text else None
        usage = b""
        if self.usage_each:
            reasoning = 0 if counts_reasoning(self.serving) else None
            usage = usage_of(len(result.prompt_token_ids or ()), 0, reasoning, is_chat=True)
        return b"".join(self.chunks.role(self.role, index, prompt, text, usage) for index in range(self.n))

    async def end(self, choices: Sequence[ChoiceStream]) -> bytes:
        """Return the usage chunk, if the client asked for it, and ``[DONE]``."""
        first = self._first
        if not self.usage or first is None:
            return DONE
        counts = counts_of(self.serving, first, choices, self.role is not None, self.multimodal_tokens)
        return self.chunks.usage(counts, self.serving.system_fingerprint) + DONE

    def failed(self, error: Exception) -> bytes:
        is_own = isinstance(error, SequenceFailed)
        body = encode(error.error.to_wire()) if is_own else with_named_code(error_of(self.serving, error))
        return b"data: %b\n\n%b" % (body, DONE)


def error_of(serving: Any, error: Exception) -> bytes:
    """Return the JSON of an error of vLLM's layer for a stream of chunks."""
    if isinstance(error, GenerationError):
        return serving._convert_generation_error_to_streaming_response(error).encode()
    return serving.create_streaming_error_response(error).encode()


def counts_reasoning(serving: Any) -> bool:
    """True if a chat answer's usage has the number of reasoning tokens."""
    return bool(serving._include_reasoning_tokens_details)


def counts_of(
    serving: Any, first: RequestOutput, choices: Sequence[ChoiceStream], is_chat: bool,
    multimodal: Mapping[str, int] | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the usage at the end; ``first`` is the first result of any choice."""
    prompt, completion = len(first.prompt_token_ids or ()), sum(choice.num_tokens for choice in choices)
    counts = _token_counts(prompt, completion)
    if serving.enable_prompt_tokens_details:
        # vLLM's details; a completion has the number of cached tokens only.
        details: dict[str, Any] = {"cached_tokens": first.num_cached_tokens}
        if is_chat:
            details["created_cache_tokens"] = first.num_cache_creation_tokens
            details["multimodal_tokens"] = multimodal or None
        known = {name: count for name, count in details.items() if count is not None}
        counts["prompt_tokens_details"] = known or None
    if is_chat and counts_reasoning(serving):
        counts["completion_tokens_details"] = {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)}
    return counts


def _token_counts(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
