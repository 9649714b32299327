"""What the chunks of one plain stream have in common, taken from the first one that vLLM wrote."""

from __future__ import annotations

from typing import Any

import msgspec

EVENT, END = "data: ", "\n\n"
# Keys of a chunk that may differ from chunk to chunk must be absent, null or empty, or a template would repeat them.
ALWAYS = frozenset({"id", "object", "created", "model", "choices"})
OF_CHOICE = frozenset({"index", "text", "delta", "logprobs", "finish_reason", "stop_reason"})


class Template:
    """Writes chunks that differ from the one it was made of in their text alone."""

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after
        self._around = len(before) + len(after)

    def frame(self, text: str) -> bytes:
        """The event with this text, framed for HTTP/1.1's chunked encoding."""
        encoded = _encode(text)
        return b"%x\r\n%b%b%b\r\n" % (self._around + len(encoded), self._before, encoded, self._after)


_encode = msgspec.json.Encoder().encode


def template_of(chunk: str) -> Template | None:
    """The template in a content chunk of one choice; None for any other event."""
    choice = _only_choice(chunk)
    if choice is None:
        return None
    key, text = _text_of(choice)
    if text is None:
        return None
    # Inside JSON strings quotes are escaped, so that nothing but the key itself can look like this.
    needle = b'"%b":%b' % (key, _encode(text))
    event = chunk.encode()
    if event.count(needle) != 1:
        return None
    at = event.index(needle) + len(key) + 3
    return Template(event[:at], event[at + len(_encode(text)) :])


def _only_choice(chunk: str) -> dict[str, Any] | None:
    if not (chunk.startswith(EVENT) and chunk.endswith(END)):
        return None
    try:
        event = msgspec.json.decode(chunk[len(EVENT) :], type=dict[str, Any])
    except msgspec.MsgspecError:
        return None
    choices = event.get("choices")
    if not _says_no_more_than(event, ALWAYS) or not isinstance(choices, list) or len(choices) != 1:
        return None
    return choices[0] if isinstance(choices[0], dict) else None


def _text_of(choice: dict[str, Any]) -> tuple[bytes, str | None]:
    if not _says_no_more_than(choice, OF_CHOICE):
        return b"", None
    if any(choice.get(key) is not None for key in ("logprobs", "finish_reason", "stop_reason")):
        return b"", None
    if "delta" not in choice:
        return b"text", choice.get("text")
    delta = choice["delta"]
    return b"content", delta.get("content") if delta.keys() == {"content"} else None


def _says_no_more_than(found: dict[str, Any], keys: frozenset[str]) -> bool:
    return all(key in keys or value is None for key, value in found.items())
