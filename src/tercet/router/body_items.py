"""How many things a body may have in it: what vLLM's layer does for each of them is done on the event loop.

A message, a part of its content, a tool, a schema's property: each is a list or an object in the JSON, and takes vLLM
some microseconds, in which no stream gets a token. Numbers in lists (prompts of token ids) and letters take next to
nothing each, and have the limit of bytes alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

from tercet.protocol import BadRequest
from tercet.protocol.error_forms import api_of

# Of ``items``, what is left where vLLM takes ten times as long for each, and for each tool there.
RESPONSES_SHARE, TOOLS_SHARE = 8, 32
# Texts in lists and entries of objects, which take half as long as an item.
VALUES_PER_ITEM = 2
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
    may_be_many = content.count(b"[") + content.count(b"{") > most
    if may_be_many or content.count(b'"') + content.count(b":") > most * VALUES_PER_ITEM:
        # A text may be full of these. Counting gives way to others, and ends where there are too many.
        await asyncio.to_thread(_count, value, most)


def _require_few_tools(value: Any, most: int) -> None:
    tools: Any = cast("dict[str, Any]", value).get("tools") if isinstance(value, dict) else None
    if isinstance(tools, list) and len(cast("list[Any]", tools)) > most:
        raise _too_many("tools", "tools", most)


def _count(value: Any, most: int) -> None:
    items = values = 0
    left: list[tuple[str, Any]] = [("", value)]
    while left:
        field, found = left.pop()
        if isinstance(found, Mapping):
            entries = cast("Mapping[str, Any]", found)
            values += len(entries)
            inner = [(field or str(name), entry) for name, entry in entries.items() if isinstance(entry, (dict, list))]
        else:
            values += sum(isinstance(entry, str) for entry in found)
            inner = [(field, entry) for entry in found if isinstance(entry, (dict, list))]
        items += len(inner)
        if items > most:
            raise _too_many(field or "the body", "lists and objects", most)
        if values > most * VALUES_PER_ITEM:
            raise _too_many(field or "the body", "texts and entries", most * VALUES_PER_ITEM)
        left += inner


def _too_many(field: str, what: str, most: int) -> BadRequest:
    message = (
        f"{field}: the request's body has more than {most} {what}, which is all that is taken (--max-request-items)"
    )
    return BadRequest(message, None if field == "the body" else field)
