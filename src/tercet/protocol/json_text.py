"""JSON that clients send: one reader for all parts that look into a body, so that they all see the same content.

RFC 8259 requires UTF-8. Python's reader, which vLLM uses, also takes UTF-16, UTF-32 and a byte order mark. It accepts
text that cannot be encoded (half of a surrogate pair) and numbers that JSON lacks (NaN). Here, encodings are unified;
text and numbers that cannot be passed on are the client's error, with the field's name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from tercet.protocol.errors import BadRequest

# What msgspec raises for invalid messages: its own errors, and Python's for text that is not UTF-8 and for nesting that
# is too deep.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
UTF8, UTF8_WITH_MARK = "utf-8", "utf-8-sig"
MARK_BYTES = 3
# Largest text, in bytes, in which the invalid field is searched: the search takes longer than reading.
MOST_EXPLAINED = 2 * 1024 * 1024
NO_TEXT = "has half of a surrogate pair, which does not encode a character: send whole characters"
# Whole numbers that every encoder here can write, and digits from which on none is read.
LEAST_WRITTEN, MOST_WRITTEN = -(2**63), 2**64 - 1
MOST_DIGITS = 400
NO_NUMBER = "is not a valid JSON number, or does not fit into a double"


def in_utf8(content: bytes) -> bytes:
    """Return JSON text in UTF-8, whichever Unicode encoding it came in.

    Bytes that are not text are returned unchanged, for the reader to refuse.
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

    Raises :class:`~tercet.protocol.errors.BadRequest`, whose ``param`` names the field if one field is invalid.
    """
    try:
        return msgspec.json.decode(content)
    except UNREADABLE as error:
        return _read_as_python_does(content, error)


def _read_as_python_does(content: bytes, error: Exception) -> Any:
    if len(content) > MOST_EXPLAINED:
        raise BadRequest(f"the request's body is not JSON: {error}") from error
    try:
        value = json.loads(content.decode(UTF8, "surrogatepass"), parse_int=_whole_number)
    except RecursionError:
        raise BadRequest("the request's body has lists or objects that are nested too deeply") from error
    except ValueError:
        raise BadRequest(f"the request's body is not JSON: {error}") from error
    for field, why in _unwritable(value):
        raise BadRequest(f"{field or 'the body'}: {why}", field or None) from error
    return value


def _whole_number(digits: str) -> float:
    """The number; infinity for a number with thousands of digits, which takes long to read and which no field needs."""
    return int(digits) if len(digits) <= MOST_DIGITS else math.inf


def unwritable_field(value: Any) -> str | None:
    """Return the name of the field of a Python value that our encoders cannot write, or None if there is none."""
    try:
        msgspec.msgpack.encode(value)  # which refuses numbers of more than 64 bits, too
    except (UnicodeEncodeError, OverflowError):
        return next((field for field, _ in _unwritable(value)), "")
    return None


def _unwritable(value: Any) -> Iterator[tuple[str, str]]:
    """Fields that cannot be written, in order, with the reasons."""
    left: list[tuple[_Path, Any]] = [(None, value)]
    while left:
        at, found = left.pop()
        if isinstance(found, str):
            if not is_text(found):
                yield _name_of(at), NO_TEXT
        elif isinstance(found, int):
            if not LEAST_WRITTEN <= found <= MOST_WRITTEN:
                yield _name_of(at), NO_NUMBER
        elif isinstance(found, float):
            if not math.isfinite(found):
                yield _name_of(at), NO_NUMBER
        elif isinstance(found, Mapping):
            named = cast("Mapping[Any, Any]", found)
            for key in named:
                if isinstance(key, str) and not is_text(key):
                    yield _name_of((at, key)), NO_TEXT
            left.extend(((at, key), item) for key, item in reversed(list(named.items())) if not _is_small(item))
        elif isinstance(found, Sequence) and not isinstance(found, (bytes, bytearray)):
            items = cast("Sequence[Any]", found)
            numbered = ((index, items[index]) for index in range(len(items) - 1, -1, -1))
            left.extend(((at, index), item) for index, item in numbered if not _is_small(item))


def _is_small(item: Any) -> bool:
    """Whether it is a number that need not be looked at again, as most items of long lists are."""
    return isinstance(item, int) and LEAST_WRITTEN <= item <= MOST_WRITTEN


# A field as its parent and its key or index; the full name is only built for fields that are reported.
_Path = tuple[Any, Any] | None


def _name_of(at: _Path) -> str:
    keys: list[str] = []
    while at is not None:
        at, key = at
        keys.append(f"[{key}]" if isinstance(key, int) else f".{as_text(str(key))}")
    return "".join(reversed(keys)).removeprefix(".")


def is_text(text: str) -> bool:
    """Return whether the text can be written in every Unicode encoding."""
    if text.isascii():
        return True
    try:
        text.encode(UTF8)
    except UnicodeEncodeError:
        return False
    return True


def as_text(text: str) -> str:
    """Return the text with backslash escapes for the characters that cannot be encoded."""
    return text if is_text(text) else text.encode(UTF8, "backslashreplace").decode(UTF8)
