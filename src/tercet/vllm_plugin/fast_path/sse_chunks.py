"""The chunks of a stream, byte-identical to those of vLLM's stream generators, written without an object for each.

Relies on the fields of ``CompletionStreamResponse`` and ``ChatCompletionStreamResponse`` that the generators set, since
a chunk has only these, and on their order; also on the fields of ``DeltaMessage`` and ``UsageInfo``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

from tercet.vllm_plugin.differences import CHUNKS_WITHOUT_TRANSFER
from tercet.vllm_plugin.fast_path.delta_json import delta_json, encode

DONE = b"data: [DONE]\n\n"
NULL = b"null"


@dataclass(frozen=True)
class ChunkFormat:
    """Format of one route's chunks.

    ``opening`` comes before a choice's text or delta, ``closing`` after it; ``last_closing`` ends a choice. ``said``
    surrounds a text that does not come from a parser. Every chunk with a choice ends with ``ending``.
    """

    object: bytes
    opening: bytes
    said: tuple[bytes, bytes]
    closing: bytes
    last_closing: bytes
    ending: bytes

    @cached_property
    def around_logprobs(self) -> tuple[bytes, bytes]:
        """The parts of a chunk before and after its log probabilities, for chunks without token ids."""
        until, _, beyond = self.closing.partition(b"%(logprobs)b")
        return until, (beyond % {b"ids": NULL, b"prompt": NULL}) + self.ending + b"}\n\n"


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
    """Return the format of completions in the installed vLLM."""
    return _former(COMPLETION) if CHUNKS_WITHOUT_TRANSFER.is_here else COMPLETION


def chat_format() -> ChunkFormat:
    """Return the format of chat answers in the installed vLLM."""
    return _former(CHAT) if CHUNKS_WITHOUT_TRANSFER.is_here else CHAT


@cache
def _former(form: ChunkFormat) -> ChunkFormat:
    closing, last_closing = (
        each.replace(b',"weight_versions":null', b"") for each in (form.closing, form.last_closing)
    )
    return replace(form, closing=closing, last_closing=last_closing, ending=b"")


class Extras(NamedTuple):
    """The fields of a chunk in addition to its text, each as JSON; ``usage`` is empty if the chunk has no usage."""

    logprobs: bytes = NULL
    token_ids: bytes = NULL
    prompt_token_ids: bytes = NULL
    usage: bytes = b""


NO_EXTRAS = Extras()


class ChunkWriter:
    """Writer of the chunks of one stream that belong to all of its choices; each is a whole event."""

    def __init__(self, form: ChunkFormat, request_id: str, created: int, model: str) -> None:
        self.form = form
        self.head = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[' % (
            encode(request_id), form.object, created, encode(model)
        )  # fmt: skip

    def choice(self, index: int) -> ChoiceChunks:
        """Return the writer of one choice's chunks."""
        return ChoiceChunks(self.form, self.head, index)

    def role(
        self,
        role: str,
        index: int = 0,
        prompt: Sequence[int] | None = None,
        text: str | None = None,
        usage: bytes = b"",
    ) -> bytes:
        """Return the chunk before a chat answer's text.

        ``prompt`` and ``text`` are the prompt's tokens and text, None if the client did not ask for them; ``usage`` is
        the field made by :func:`usage_of`, or empty.
        """
        choice = b'{"index":%d,"delta":{"role":%b,"content":""},"logprobs":null,"finish_reason":null}]%b' % (
            index, encode(role), usage
        )  # fmt: skip
        return b'%b%b,"prompt_token_ids":%b,"prompt_text":%b}\n\n' % (self.head, choice, encode(prompt), encode(text))

    def usage(self, counts: Mapping[str, Any], fingerprint: str | None) -> bytes:
        """Return the usage chunk, without the counts that are None."""
        known = {name: count for name, count in counts.items() if count is not None}
        return b'%b],"usage":%b%b' % (self.head, encode(known), _end(fingerprint))


class ChoiceChunks:
    """Writer of one choice's chunks; each is a whole event. See ``ChoiceEvents`` for the said part."""

    nothing = b"{}"

    def __init__(self, form: ChunkFormat, head: bytes, index: int) -> None:
        self._form = form
        self._before = head + form.opening % index
        self._text_before = self._before + form.said[0]
        until, ending = self._logprobs_around = form.around_logprobs
        self._around_logprobs = len(self._before) + len(until) + len(ending)
        self._said_after = until + NULL + ending
        self._text_after = form.said[1] + self._said_after
        self._around = len(self._text_before) + len(self._text_after)
        self._around_said = len(self._before) + len(self._said_after)

    def text(self, text: str) -> bytes:
        """Return a chunk with ``text`` only, framed for HTTP/1.1's chunked encoding."""
        encoded = encode(text)
        return b"%x\r\n%b%b%b\r\n" % (self._around + len(encoded), self._text_before, encoded, self._text_after)

    def thinking(self, text: str) -> bytes:
        """Return a chunk with reasoning ``text`` only, framed."""
        return self.only(b'{"reasoning":%b}' % encode(text))

    def more_arguments(self, call: int, text: str) -> bytes:
        """Return a chunk with more arguments of the call with index ``call`` only, framed."""
        return self.only(self.arguments(call, text))

    def said(self, text: str) -> bytes:
        """Return the said part for ``text``."""
        before, after = self._form.said
        return before + encode(text) + after

    def thought(self, text: str) -> bytes:
        """Return the said part for reasoning ``text``."""
        return b'{"reasoning":%b}' % encode(text)

    def arguments(self, call: int, text: str) -> bytes:
        """Return the said part for more arguments of the call with index ``call``."""
        return b'{"content":null,"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (call, encode(text))

    def delta(self, delta: Any) -> bytes:
        """Return the said part for a parser's delta."""
        return delta_json(delta)

    def only(self, said: bytes, logprobs: bytes = NULL) -> bytes:
        """Return a chunk with ``said`` and at most log probabilities, framed for HTTP/1.1's chunked encoding."""
        if logprobs is NULL:
            return b"%x\r\n%b%b%b\r\n" % (self._around_said + len(said), self._before, said, self._said_after)
        until, ending = self._logprobs_around
        size = self._around_logprobs + len(said) + len(logprobs)
        return b"%x\r\n%b%b%b%b%b\r\n" % (size, self._before, said, until, logprobs, ending)

    def more(self, said: bytes, extras: Extras) -> bytes:
        """Return a chunk with ``said`` and ``extras`` that does not end the choice, not framed."""
        closing = self._form.closing % _values(extras)
        return b"%b%b%b%b%b}\n\n" % (self._before, said, closing, extras.usage, self._form.ending)

    def last(
        self, said: bytes, finish_reason: str, stop_reason: int | str | None, fingerprint: str | None,
        extras: Extras = NO_EXTRAS,
    ) -> bytes:  # fmt: skip
        """Return the chunk that ends the choice, not framed; ``fingerprint`` is the system's, None if usage follows."""
        values = {**_values(extras), b"reason": encode(finish_reason), b"stop": encode(stop_reason)}
        closing = self._form.last_closing % values + extras.usage
        return self._before + said + closing + _end(fingerprint, self._form.ending)


def usage_of(prompt: int, completion: int, reasoning: int | None, *, is_chat: bool) -> bytes:
    """Return a chunk's field ``usage``, for the tokens so far; ``reasoning`` is None if they are not counted."""
    counts: dict[str, Any] = {
        "prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion
    }  # fmt: skip
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
