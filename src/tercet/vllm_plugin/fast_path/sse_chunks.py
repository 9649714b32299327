"""The chunks of a stream, byte-identical to those of vLLM's stream generators, without creating objects.

Relies on the fields of ``CompletionStreamResponse`` and ``ChatCompletionStreamResponse`` that the generators set, since
a chunk has just those, and on their order; so on those of ``DeltaMessage`` and ``UsageInfo``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tercet.vllm_plugin.differences import CHUNKS_WITHOUT_TRANSFER
from tercet.vllm_plugin.fast_path.delta_json import delta_json, encode

DONE = b"data: [DONE]\n\n"
NULL = b"null"


@dataclass(frozen=True)
class ChunkFormat:
    """Format of one route's chunks.

    ``opening`` comes before what a choice says, ``closing`` after it; ``last_closing`` ends a choice. ``said``
    surrounds a text that is not the answer of a parser. ``ending`` is what every chunk with a choice ends with.
    """

    object: bytes
    opening: bytes
    said: tuple[bytes, bytes]
    closing: bytes
    last_closing: bytes
    ending: bytes


COMPLETION = ChunkFormat(
    object=b"text_completion",
    opening=b'{"index":%d,"text":',
    said=(b"", b""),
    closing=b',"logprobs":%(logprobs)b,"finish_reason":null,"stop_reason":null,"prompt_token_ids":%(prompt)b,'
    b'"token_ids":%(ids)b,"weight_versions":null}]',
    last_closing=b',"logprobs":%(logprobs)b,"finish_reason":%(reason)b,"stop_reason":%(stop)b,'
    b'"prompt_token_ids":%(prompt)b,"token_ids":%(ids)b,"weight_versions":null}]',
    ending=b',"kv_transfer_params":null',
)
CHAT = ChunkFormat(
    object=b"chat.completion.chunk",
    opening=b'{"index":%d,"delta":',
    said=(b'{"content":', b"}"),
    closing=b',"logprobs":%(logprobs)b,"finish_reason":null,"token_ids":%(ids)b}]',
    last_closing=b',"logprobs":%(logprobs)b,"finish_reason":%(reason)b,"stop_reason":%(stop)b,"token_ids":%(ids)b,'
    b'"weight_versions":null}]',
    ending=b',"kv_transfer_params":null',
)


def completion_format() -> ChunkFormat:
    """That of completions in the installed vLLM."""
    return _former(COMPLETION) if CHUNKS_WITHOUT_TRANSFER.is_here else COMPLETION


def chat_format() -> ChunkFormat:
    """That of chat answers in the installed vLLM."""
    return _former(CHAT) if CHUNKS_WITHOUT_TRANSFER.is_here else CHAT


def _former(form: ChunkFormat) -> ChunkFormat:
    closing, last_closing = (
        each.replace(b',"weight_versions":null', b"") for each in (form.closing, form.last_closing)
    )
    return replace(form, closing=closing, last_closing=last_closing, ending=b"")


class Extras(NamedTuple):
    """What a chunk has next to its text, each as JSON; ``usage`` is empty where the chunk does not count tokens."""

    logprobs: bytes = NULL
    token_ids: bytes = NULL
    prompt_token_ids: bytes = NULL
    usage: bytes = b""


NO_EXTRAS = Extras()


class ChunkWriter:
    """Makes the chunks of one stream that belong to all of its choices; each is a whole event."""

    def __init__(self, form: ChunkFormat, request_id: str, created: int, model: str) -> None:
        self.form = form
        self.head = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[' % (
            encode(request_id), form.object, created, encode(model)
        )  # fmt: skip

    def choice(self, index: int) -> ChoiceChunks:
        """The chunks of one choice."""
        return ChoiceChunks(self.form, self.head, index)

    def role(
        self,
        role: str,
        index: int = 0,
        prompt: Sequence[int] | None = None,
        text: str | None = None,
        usage: bytes = b"",
    ) -> bytes:
        """The chunk before a chat answer's text; ``prompt`` and ``text`` are the prompt's, where they are asked for."""
        choice = b'{"index":%d,"delta":{"role":%b,"content":""},"logprobs":null,"finish_reason":null}]%b' % (
            index, encode(role), usage
        )  # fmt: skip
        return b'%b%b,"prompt_token_ids":%b,"prompt_text":%b}\n\n' % (self.head, choice, encode(prompt), encode(text))

    def usage(self, counts: Mapping[str, Any], fingerprint: str | None) -> bytes:
        """The chunk that counts all tokens, without what is not known."""
        known = {name: count for name, count in counts.items() if count is not None}
        return b'%b],"usage":%b%b' % (self.head, encode(known), _end(fingerprint))


class ChoiceChunks:
    """Makes the chunks of one choice; each is a whole event."""

    nothing = b"{}"

    def __init__(self, form: ChunkFormat, head: bytes, index: int) -> None:
        self._form = form
        self._before = head + form.opening % index
        self._text_before = self._before + form.said[0]
        until, _, beyond = form.closing.partition(b"%(logprobs)b")
        ending = (beyond % {b"ids": NULL, b"prompt": NULL}) + form.ending + b"}\n\n"
        self._logprobs_around = until, ending
        self._around_logprobs = len(self._before) + len(until) + len(ending)
        self._said_after = until + NULL + ending
        self._text_after = form.said[1] + self._said_after
        self._around = len(self._text_before) + len(self._text_after)
        self._around_said = len(self._before) + len(self._said_after)

    def text(self, text: str) -> bytes:
        """More text and nothing else, framed for HTTP/1.1's chunked encoding."""
        encoded = encode(text)
        return b"%x\r\n%b%b%b\r\n" % (self._around + len(encoded), self._text_before, encoded, self._text_after)

    def thinking(self, text: str) -> bytes:
        """More reasoning and nothing else, framed."""
        return self.only(b'{"reasoning":%b}' % encode(text))

    def more_arguments(self, call: int, text: str) -> bytes:
        """More arguments of a call and nothing else, framed."""
        return self.only(self.arguments(call, text))

    def said(self, text: str) -> bytes:
        """A text as what the choice says."""
        before, after = self._form.said
        return before + encode(text) + after

    def thought(self, text: str) -> bytes:
        """Reasoning as what the choice says."""
        return b'{"reasoning":%b}' % encode(text)

    def arguments(self, call: int, text: str) -> bytes:
        """More arguments of a call as what the choice says."""
        return b'{"content":null,"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (call, encode(text))

    def delta(self, delta: Any) -> bytes:
        """A parser's delta as what the choice says."""
        return delta_json(delta)

    def only(self, said: bytes, logprobs: bytes = NULL) -> bytes:
        """What the choice says, with its log probabilities at most, framed for HTTP/1.1's chunked encoding."""
        if logprobs is NULL:
            return b"%x\r\n%b%b%b\r\n" % (self._around_said + len(said), self._before, said, self._said_after)
        until, ending = self._logprobs_around
        size = self._around_logprobs + len(said) + len(logprobs)
        return b"%x\r\n%b%b%b%b%b\r\n" % (size, self._before, said, until, logprobs, ending)

    def more(self, said: bytes, extras: Extras) -> bytes:
        """A chunk that does not end the choice."""
        closing = self._form.closing % _values(extras)
        return b"%b%b%b%b%b}\n\n" % (self._before, said, closing, extras.usage, self._form.ending)

    def last(
        self, said: bytes, finish_reason: str, stop_reason: int | str | None, fingerprint: str | None,
        extras: Extras = NO_EXTRAS,
    ) -> bytes:  # fmt: skip
        """The chunk that ends the choice; ``fingerprint`` is the system's, where no usage follows."""
        values = {**_values(extras), b"reason": encode(finish_reason), b"stop": encode(stop_reason)}
        closing = self._form.last_closing % values + extras.usage
        return self._before + said + closing + _end(fingerprint, self._form.ending)


def usage_of(prompt: int, completion: int, reasoning: int | None, *, is_chat: bool) -> bytes:
    """The field in which a chunk counts the tokens so far; ``reasoning`` tokens are told where a parser knows them."""
    counts: dict[str, Any] = {
        "prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion
    }  # fmt: skip
    if is_chat:
        counts["completion_tokens_details"] = None if reasoning is None else {"reasoning_tokens": reasoning}
    return b',"usage":' + encode(counts)


def framed(event: bytes) -> bytes:
    """An event, as one chunk of HTTP/1.1's chunked encoding."""
    return b"%x\r\n%b\r\n" % (len(event), event)


def _values(extras: Extras) -> dict[bytes, bytes]:
    return {b"logprobs": extras.logprobs, b"ids": extras.token_ids, b"prompt": extras.prompt_token_ids}


def _end(fingerprint: str | None, ending: bytes = b"") -> bytes:
    own = b"" if fingerprint is None else b',"system_fingerprint":%b' % encode(fingerprint)
    return b"%b%b}\n\n" % (own, ending)
