"""JSON that clients send: one reader for all who look into a body, so that they all see the same in it.

RFC 8259 asks for UTF-8. Python's reader, which vLLM uses, also takes UTF-16, UTF-32 and a byte order mark, and carries
text that no encoder can write (half of a surrogate pair) and numbers that JSON lacks (NaN). Encodings are unified here;
text and numbers that cannot be passed on are the client's error, with the field's name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from tercet.protocol.errors import BadRequest

# What msgspec raises for bytes that are no message: beside its own errors it lets through that text is not UTF-8, and
# that something is nested too deeply.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
UTF8, UTF8_WITH_MARK = "utf-8", "utf-8-sig"
MARK_BYTES = 3
# Bytes of a text in which the field is looked for that makes it none: looking takes longer than reading.
MOST_EXPLAINED = 2 * 1024 * 1024
NO_TEXT = "has half of a surrogate pair, which stands for no character: send whole characters"
NO_NUMBER = "is no number of JSON's, or larger than a double may be"


def in_utf8(content: bytes) -> bytes:
    """JSON in the encoding that JSON is to have, whichever of Unicode's it came in.

    What is no text stays as it is, for the reader to refuse.
    """
    encoding = json.detect_encoding(content)
    if encoding == UTF8:
        return content
    if encoding == UTF8_WITH_MARK:
        return content[MARK_BYTES:]
    try:
        return content.decode(encoding, "surrogatepass").encode(UTF8, "surrogatepass")
    except UnicodeError:
        return content


def read_json(content: bytes) -> Any:
    """The value of a JSON text that :func:`in_utf8` has made.

    Raises :class:`~tercet.protocol.errors.BadRequest`, whose ``param`` names the field where it is one field's fault.
    """
    try:
        return msgspec.json.decode(content)
    except UNREADABLE as error:
        return _read_as_python_does(content, error)


def _read_as_python_does(content: bytes, error: Exception) -> Any:
    if len(content) > MOST_EXPLAINED:
        raise BadRequest(f"the request's body is no JSON: {error}") from error
    try:
        value = json.loads(content.decode(UTF8, "surrogatepass"))
    except RecursionError:
        raise BadRequest("the request's body has lists or objects that are nested too deeply") from error
    except ValueError:
        raise BadRequest(f"the request's body is no JSON: {error}") from error
    for field, why in _unwritable(value):
        raise BadRequest(f"{field or 'the body'}: {why}", field or None) from error
    return value


def unwritable_field(value: Any) -> str | None:
    """The field of a value as Python has it that no encoder of ours can write, or None: all can be written."""
    try:
        msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return next((field for field, _ in _unwritable(value)), "")
    return None


def _unwritable(value: Any) -> Iterator[tuple[str, str]]:
    """Fields that cannot be written, in their order, and why."""
    left: list[tuple[_Path, Any]] = [(None, value)]
    while left:
        at, found = left.pop()
        if isinstance(found, str):
            if not is_text(found):
                yield _name_of(at), NO_TEXT
        elif isinstance(found, float):
            if not math.isfinite(found):
                yield _name_of(at), NO_NUMBER
        elif isinstance(found, Mapping):
            named = cast("Mapping[Any, Any]", found)
            for key in named:
                if isinstance(key, str) and not is_text(key):
                    yield _name_of((at, key)), NO_TEXT
            left.extend(((at, key), item) for key, item in reversed(list(named.items())) if not isinstance(item, int))
        elif isinstance(found, Sequence) and not isinstance(found, (bytes, bytearray)):
            items = cast("Sequence[Any]", found)
            numbered = ((index, items[index]) for index in range(len(items) - 1, -1, -1))
            left.extend(((at, index), item) for index, item in numbered if not isinstance(item, int))


# A field by the one that it is in and its key or index; names are made of those that are told of.
_Path = tuple[Any, Any] | None


def _name_of(at: _Path) -> str:
    keys: list[str] = []
    while at is not None:
        at, key = at
        keys.append(f"[{key}]" if isinstance(key, int) else f".{as_text(str(key))}")
    return "".join(reversed(keys)).removeprefix(".")


def is_text(text: str) -> bool:
    """Whether it can be written in any encoding of Unicode."""
    if text.isascii():
        return True
    try:
        text.encode(UTF8)
    except UnicodeEncodeError:
        return False
    return True


def as_text(text: str) -> str:
    """The text with an escape, as a program would write it, for whatever of it cannot be written."""
    return text if is_text(text) else text.encode(UTF8, "backslashreplace").decode(UTF8)
