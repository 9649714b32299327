"""A limit for the number of items in a request body, since vLLM processes each of them on the event loop.

A message, a part of its content, a tool, a property of a schema: each is a list or an object in the JSON, and takes
vLLM some microseconds, in which no stream gets a token. Numbers in lists (prompts of token ids) take a hundredth of
that; characters take almost no time, and only the limit of bytes applies to them. Structured outputs are checked before
vLLM gets them, since vLLM reads a whole structure before it refuses it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, cast

from tercet.protocol import BadRequest
from tercet.protocol.errors import api_of
from tercet.protocol.grammar_bounds import require_small

# Divisors of the limit in the Responses API, where vLLM takes about ten times as long for each item, and for tools.
RESPONSES_SHARE, TOOLS_SHARE = 8, 32
# Texts in lists and entries of objects per item: each takes half as long as an item.
VALUES_PER_ITEM = 2
# Numbers in the lists of one field per item: a prompt may be as long as the model allows, and vLLM reads each of
# ``stop_token_ids`` several times.
NUMBERS_PER_ITEM, OF_PROMPTS, OF_STOPS = 32, 96, 2
NUMBERS_OF = {"prompt": OF_PROMPTS, "stop_token_ids": OF_STOPS}
# Bytes of a body from which on its structured outputs are checked in another thread.
LONG = 16 * 1024
# Fields in which the APIs have the schema of an answer.
OWN_FIELD = "structured_outputs"
FORMATS = (("response_format",), ("text", "format"), ("output_format",), ("output_config", "format"))
# Limit for commas, brackets and braces, also those in texts: it bounds the time of decoding.
MOST_SEPARATORS = 2_000_000


def require_readable(content: bytes) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for JSON with too many values."""
    if sum(map(content.count, (b",", b"[", b"{"))) > MOST_SEPARATORS:
        raise BadRequest(f"the request's body has more than {MOST_SEPARATORS} values, which is the limit")


async def require_few_items(path: str, content: bytes, value: Any, most: int) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if the JSON ``value`` of ``content`` has more than ``most`` items."""
    if api_of(path) == "responses":
        _require_few_tools(value, most // TOOLS_SHARE or 1)
        most = most // RESPONSES_SHARE or 1
    may_be_many = content.count(b"[") + content.count(b"{") > most or content.count(b",") > most * OF_STOPS
    if may_be_many or content.count(b'"') + content.count(b":") > most * VALUES_PER_ITEM:
        # Texts may contain these characters, too, so count exactly: in a thread, and no further than the limit.
        await asyncio.to_thread(_count, value, most)


async def require_small_structures(content: bytes, fields: Mapping[str, Any]) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for a structured output that takes too long to compile."""
    for field, structured in _structures(fields):
        if len(content) > LONG:
            await asyncio.to_thread(_require_small, structured, field)
        else:
            _require_small(structured, field)


def _require_small(structured: Mapping[str, Any], field: str) -> None:
    try:
        require_small(structured, field)
    except BadRequest as error:
        if field == OWN_FIELD:
            raise
        raise BadRequest(error.message.replace(f"{field}.json", field, 1), field) from error


def _structures(fields: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the structured outputs of a request in the form of vLLM's ``structured_outputs``, with their fields."""
    structured = fields.get(OWN_FIELD)
    if isinstance(structured, dict):
        yield OWN_FIELD, cast("dict[str, Any]", structured)
    for path in FORMATS:
        found: Any = fields
        for name in path:
            found = cast("dict[str, Any]", found).get(name) if isinstance(found, dict) else None
        if isinstance(found, dict):
            yield ".".join(path), {"json": found}


def _require_few_tools(value: Any, most: int) -> None:
    tools: Any = cast("dict[str, Any]", value).get("tools") if isinstance(value, dict) else None
    if isinstance(tools, list) and len(cast("list[Any]", tools)) > most:
        raise _too_many("tools", "tools", most)


def _count(value: Any, most: int) -> None:
    items = values = 0
    numbers = Counter[str]()
    left: list[tuple[str, Any]] = [("", value)]
    while left:
        field, found = left.pop()
        if isinstance(found, dict):
            entries = cast("dict[str, Any]", found)
            values += len(entries)
            inner: list[tuple[str, Any]] = [
                (field or str(name), entry) for name, entry in entries.items() if isinstance(entry, (dict, list))
            ]
        else:
            elements = cast("list[Any]", found)
            texts = sum(isinstance(entry, str) for entry in elements)
            inner = [(field, entry) for entry in elements if isinstance(entry, (dict, list))]
            values += texts
            numbers[field] += len(elements) - texts - len(inner)
        items += len(inner)
        if items > most:
            raise _too_many(field or "the body", "lists and objects", most)
        if values > most * VALUES_PER_ITEM:
            raise _too_many(field or "the body", "texts and entries", most * VALUES_PER_ITEM)
        if numbers[field] > (most_numbers := most * NUMBERS_OF.get(field, NUMBERS_PER_ITEM)):
            raise _too_many(field or "the body", "numbers", most_numbers)
        left += inner


def _too_many(field: str, what: str, most: int) -> BadRequest:
    message = f"{field}: the request's body has more than {most} {what}, which is the limit (max-request-items)"
    return BadRequest(message, None if field == "the body" else field)
