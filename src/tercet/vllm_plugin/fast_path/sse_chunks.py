"""The chunks of a plain stream, byte-identical to those of vLLM's stream generators, without creating objects.

Relies on the fields of ``CompletionStreamResponse`` and ``ChatCompletionStreamResponse`` that the generators set, since
a chunk has just those, and on their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class ChunkFormat:
    """Format of one route's chunks: ``opening`` is the part before the text of a choice, the rest follows it."""

    object: bytes
    opening: bytes
    closing: bytes
    last_closing: bytes


COMPLETION = ChunkFormat(
    b"text_completion",
    b'{"index":0,"text":',
    b',"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n',
    b',"logprobs":null,"finish_reason":%b,"stop_reason":%b,"prompt_token_ids":null,"token_ids":null}]',
)
CHAT = ChunkFormat(
    b"chat.completion.chunk",
    b'{"index":0,"delta":{"content":',
    b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n',
    b'},"logprobs":null,"finish_reason":%b,"stop_reason":%b,"token_ids":null}]',
)


class ChunkWriter:
    """Makes the chunks of one stream of one choice; each is a whole event."""

    def __init__(self, form: ChunkFormat, request_id: str, created: int, model: str) -> None:
        self._head = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[' % (
            _encode(request_id), form.object, created, _encode(model)
        )  # fmt: skip
        self._before = self._head + form.opening
        self._after = form.closing
        self._around = len(self._before) + len(self._after)
        self._last_closing = form.last_closing

    def text(self, text: str) -> bytes:
        """More text, framed for HTTP/1.1's chunked encoding."""
        encoded = _encode(text)
        return b"%x\r\n%b%b%b\r\n" % (self._around + len(encoded), self._before, encoded, self._after)

    def role(self, role: str) -> bytes:
        """The chunk before a chat answer's text, framed."""
        choice = b'{"index":0,"delta":{"role":%b,"content":""},"logprobs":null,"finish_reason":null}]' % _encode(role)
        return framed(b'%b%b,"prompt_token_ids":null,"prompt_text":null}\n\n' % (self._head, choice))

    def last(self, text: str, finish_reason: str, stop_reason: int | str | None, fingerprint: str | None) -> bytes:
        """The chunk that ends the choice; ``fingerprint`` is the system's, where no usage follows."""
        closing = self._last_closing % (_encode(finish_reason), _encode(stop_reason))
        return self._before + _encode(text) + closing + _fingerprint(fingerprint)

    def usage(self, prompt: int, completion: int, details: dict[str, int] | None, fingerprint: str | None) -> bytes:
        """The chunk that counts tokens; ``details`` are those of the prompt."""
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
        more = {"prompt_tokens_details": details} if details is not None else {}
        return b'%b],"usage":%b%b' % (self._head, _encode({**usage, **more}), _fingerprint(fingerprint))


def framed(event: bytes) -> bytes:
    """An event, as one chunk of HTTP/1.1's chunked encoding."""
    return b"%x\r\n%b\r\n" % (len(event), event)


def _fingerprint(fingerprint: str | None) -> bytes:
    return b"}\n\n" if fingerprint is None else b',"system_fingerprint":%b}\n\n' % _encode(fingerprint)
