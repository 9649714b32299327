"""Reader of JSON from clients. All parts that read a body use it, so that they all see the same content.

RFC 8259 requires UTF-8. Python's reader, which vLLM uses, also takes UTF-16, UTF-32 and a byte order mark. It accepts
text that cannot be encoded (half of a surrogate pair) and numbers that JSON lacks (NaN). Here, other encodings are
converted to UTF-8; text and numbers that cannot be passed on are an error of the client, which names the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from tercet.protocol.errors import BadRequest, writable

# Errors of msgspec for invalid messages: its own, and Python's for text that is not UTF-8 and for too deep nesting.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
UTF8, UTF8_WITH_MARK = "utf-8", "utf-8-sig"
MARK_BYTES = 3
# Maximum size, in bytes, of a text that is searched for the invalid field: the search takes longer than reading.
MOST_EXPLAINED = 2 * 1024 * 1024
NO_TEXT = "has half of a surrogate pair, which does not encode a character: send whole characters"
# Range of the whole numbers that every encoder can write. A number with more than MOST_DIGITS digits is not read.
LEAST_WRITTEN, MOST_WRITTEN = -(2**63), 2**64 - 1
MOST_DIGITS = 400
NO_NUMBER = "is not a valid JSON number, or does not fit into a double"


def in_utf8(content: bytes) -> bytes:
    """Return JSON text in UTF-8; ``content`` may be in any Unicode encoding.

    Bytes that are not text are returned unchanged, and the reader refuses them.
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
    """Return the value of a JSON text that :func:`in_utf8` has made.

    Raises :class:`~tercet.protocol.errors.BadRequest`, whose ``param`` names the field if one field is invalid.
    """
    try:
        return msgspec.json.decode(content)
    except UNREADABLE as error:
        # The explanation reads the body again in Python, which takes long for a large one.
        if len(content) > MOST_EXPLAINED:
            raise BadRequest(f"the request's body is not JSON: {error}") from error
        try:
            # A number with more digits than any field accepts becomes infinity: reading it takes long.
            value = json.loads(
                content.decode(UTF8, "surrogatepass"),
                parse_int=lambda digits: int(digits) if len(digits) <= MOST_DIGITS else math.inf,
            )
        except RecursionError:
            raise BadRequest("the request's body has lists or objects that are nested too deeply") from error
        except ValueError:
            raise BadRequest(f"the request's body is not JSON: {error}") from error
        for field, why in _unwritable(value):
            raise BadRequest(f"{field or 'the body'}: {why}", field or None) from error
        return value


def unwritable_field(value: Any) -> str | None:
    """Return the name of the field of ``value`` that cannot be encoded, or None if all can."""
    try:
        msgspec.msgpack.encode(value)  # which refuses numbers of more than 64 bits, too
    except (UnicodeEncodeError, OverflowError):
        return next((field for field, _ in _unwritable(value)), "")
    return None


def _unwritable(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the name of each field that cannot be encoded, in order, with the reason."""
    # A stack and not recursion: clients choose how deep their lists are nested.
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
    """True for a whole number that can be encoded, such as most items of long lists: it needs no second check."""
    return isinstance(item, int) and LEAST_WRITTEN <= item <= MOST_WRITTEN


# A field as its parent and its key or index. The full name is only built for fields that are reported.
_Path = tuple[Any, Any] | None


def _name_of(at: _Path) -> str:
    keys: list[str] = []
    while at is not None:
        at, key = at
        keys.append(f"[{key}]" if isinstance(key, int) else f".{writable(str(key))}")
    return "".join(reversed(keys)).removeprefix(".")


def is_text(text: str) -> bool:
    """Return True if the text can be written in every Unicode encoding."""
    if text.isascii():
        return True
    try:
        text.encode(UTF8)
    except UnicodeEncodeError:
        return False
    return True
