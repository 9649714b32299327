"""How many things a body may have in it: what vLLM's layer does for each of them is done on the event loop.

A message, a part of its content, a tool, a schema's property: each is a list or an object in the JSON, and takes vLLM
some microseconds, in which no stream gets a token. Numbers in lists (prompts of token ids) take a hundredth of that;
letters take next to nothing, and have the limit of bytes alone. Structured outputs are looked at before vLLM does,
which reads all of a structure before it is refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, cast

from tercet.protocol import BadRequest
from tercet.protocol.error_forms import api_of
from tercet.protocol.grammar_bounds import require_small

# Of ``items``, what is left where vLLM takes ten times as long for each, and for each tool there.
RESPONSES_SHARE, TOOLS_SHARE = 8, 32
# Texts in lists and entries of objects, which take half as long as an item.
VALUES_PER_ITEM = 2
# And numbers in the lists of one field: a prompt may be as long as a model takes, and vLLM looks at each
# ``stop_token_ids`` several times.
NUMBERS_PER_ITEM, OF_PROMPTS, OF_STOPS = 32, 96, 2
NUMBERS_OF = {"prompt": OF_PROMPTS, "stop_token_ids": OF_STOPS}
# Bytes of a body from which on its structure is looked at in another thread.
LONG = 16 * 1024
# Where the APIs have the schema of an answer.
OWN_FIELD = "structured_outputs"
FORMATS = (("response_format",), ("text", "format"), ("output_format",), ("output_config", "format"))
# Commas, brackets and braces, in texts too: what reading alone may cost.
MOST_SEPARATORS = 2_000_000


def require_readable(content: bytes) -> None:
    """Raises :class:`~tercet.protocol.BadRequest` for JSON with too many values."""
    if sum(map(content.count, (b",", b"[", b"{"))) > MOST_SEPARATORS:
        raise BadRequest(f"the request's body has more than {MOST_SEPARATORS} values, which is all that is read")


async def require_few_items(path: str, content: bytes, value: Any, most: int) -> None:
    """Raises :class:`~tercet.protocol.BadRequest` if the JSON ``value`` of ``content`` has more than ``most`` items."""
    if api_of(path) == "responses":
        _require_few_tools(value, most // TOOLS_SHARE or 1)
        most = most // RESPONSES_SHARE or 1
    may_be_many = content.count(b"[") + content.count(b"{") > most or content.count(b",") > most * OF_STOPS
    if may_be_many or content.count(b'"') + content.count(b":") > most * VALUES_PER_ITEM:
        # A text may be full of these. Counting gives way to others, and ends where there are too many.
        await asyncio.to_thread(_count, value, most)


async def require_small_structures(content: bytes, fields: Mapping[str, Any]) -> None:
    """Raises :class:`~tercet.protocol.BadRequest` for a structured output that takes too long to compile."""
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
    """Of each API, as vLLM's ``structured_outputs``; the field that has it is named."""
    structured = fields.get(OWN_FIELD)
    if isinstance(structured, Mapping):
        yield OWN_FIELD, cast("Mapping[str, Any]", structured)
    for path in FORMATS:
        found: Any = fields
        for name in path:
            found = cast("Mapping[str, Any]", found).get(name) if isinstance(found, Mapping) else None
        if isinstance(found, Mapping):
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
        if isinstance(found, Mapping):
            entries = cast("Mapping[str, Any]", found)
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
    message = f"{field}: the request's body has more than {most} {what}, which is all that is taken (max-request-items)"
    return BadRequest(message, None if field == "the body" else field)
