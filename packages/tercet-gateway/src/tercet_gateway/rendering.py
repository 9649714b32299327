"""Tokens of a prompt without an engine: estimates by characters here, the model's tokens in :mod:`.model_renderer`.

The tokens name blocks of a prefix index, and give the length of a prompt; they are not used to generate. An error
therefore only costs a worse pick.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from struct import unpack_from
from typing import Any, Protocol, cast

from tercet_gateway.openai_call import OpenAICall

CHARACTERS_PER_TOKEN = 4
MOST_TOLD, MOST_TOKENS = 131_072, 262_144
"""Most tokens of a prompt that are distinguished, and most that are counted."""
MOST_PARTS = 4096
"""Most messages and parts of messages that are read for an estimate."""
Tokens = tuple[int, ...]


class Renderer(Protocol):
    """A maker of calls' tokens. It must not wait for anything else, nor block other requests for more than moments."""

    async def tokens(self, call: OpenAICall) -> Tokens:
        """Return the prompt's tokens, or about as many stand-ins; empty if the call has no prompt."""
        ...

    def close(self) -> None:
        """Release resources; no more calls may follow."""
        ...


class ByCharacters:
    """A renderer without a model: each four bytes of text are a token, and its number.

    Equal prompts have equal tokens, and lengths are about right. Such tokens match nothing that engines report, only
    prompts that were routed before.
    """

    async def tokens(self, call: OpenAICall) -> Tokens:
        return estimated(call)

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


def estimated(call: OpenAICall) -> Tokens:
    """Return a call's token ids if it has them; otherwise stand-ins for its text."""
    if call.opening:
        return stand_ins(call.opening, call.size)
    body = call.body
    given = body.prompt if body.prompt is not None else body.input
    said = token_ids(given) if body.messages is None else None
    return stand_ins(plain_text(call).encode("utf-8", "surrogatepass")) if said is None else said


def stand_ins(data: bytes, size: int | None = None) -> Tokens:
    """Return stand-ins for the tokens of a text; ``data`` is its beginning if the text has ``size`` bytes."""
    told = min(len(data) // CHARACTERS_PER_TOKEN, MOST_TOLD)
    counted = min((len(data) if size is None else size) // CHARACTERS_PER_TOKEN, MOST_TOKENS)
    return unpack_from(f"<{told}I", data) + (0,) * (counted - told)


def token_ids(given: object) -> Tokens | None:
    """Return the tokens of a prompt that is given as token ids; None for another prompt."""
    if not isinstance(given, list) or not given or type(cast("list[Any]", given)[0]) is not int:
        return None
    items = cast("list[Any]", given)
    try:
        told = array("I", items[:MOST_TOLD])
    except (TypeError, OverflowError):
        return None
    return tuple(told) + (0,) * (min(len(items), MOST_TOKENS) - len(told))


def plain_text(call: OpenAICall) -> str:
    """Return a call's text, in order."""
    body = call.body
    if body.messages is not None:
        return "\n".join(_texts(body.messages))
    given = body.prompt if body.prompt is not None else body.input
    return "\n".join(_texts([body.instructions, given]))


def _texts(content: object) -> Iterator[str]:
    """Yield the strings in nested strings, parts, messages and lists of these; other types are ignored."""
    left, stack = MOST_PARTS, [content]
    while stack and left:
        left -= 1
        part = stack.pop()
        if part is None:
            continue
        if isinstance(part, str):
            yield part
        elif isinstance(part, Mapping):
            fields = cast("Mapping[str, Any]", part)
            if isinstance(role := fields.get("role"), str):
                yield f"{role}:"
            stack.append(fields.get("text", fields.get("content")))
        elif isinstance(part, Sequence):
            stack.extend(reversed(cast("Sequence[object]", part)[:left]))
