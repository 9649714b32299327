"""A prompt's tokens without an engine: an estimate by characters here, as the model's in :mod:`.model_renderer`.

What comes out names blocks of a prefix index, and says how long a prompt is; nothing is ever generated from it. So it
may be off, at the cost of a worse pick.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from struct import unpack_from
from typing import Any, Protocol, cast

from tercet.gateway.openai_call import OpenAICall

CHARACTERS_PER_TOKEN = 4
MOST_TOLD, MOST_TOKENS = 131_072, 262_144
"""Of a prompt, tokens that are told apart, and tokens that are counted: what is behind them costs nothing."""
MOST_PARTS = 4096
"""Messages and parts of messages that are read for an estimate."""
Tokens = tuple[int, ...]


class Renderer(Protocol):
    """Makes tokens of calls. Waits for nothing but its own work, and stops no other request for more than moments."""

    async def tokens(self, call: OpenAICall) -> Tokens:
        """The prompt's tokens, or as many stand-ins as there are about; none where the call has no prompt."""
        ...

    def close(self) -> None:
        """Nothing is asked of it any more."""
        ...


class ByCharacters:
    """Four bytes of text are a token, whose number they are: equal prompts are equal, and their length is about right.

    Such tokens match nothing that engines say they hold, only what was routed where.
    """

    async def tokens(self, call: OpenAICall) -> Tokens:
        return estimated(call)

    def close(self) -> None:
        """It has nothing."""


def estimated(call: OpenAICall) -> Tokens:
    """A call's tokens if it says them, and stand-ins for its text if not."""
    if call.opening:
        return stand_ins(call.opening, call.size)
    body = call.body
    given = body.prompt if body.prompt is not None else body.input
    said = token_ids(given) if body.messages is None else None
    return stand_ins(plain_text(call).encode("utf-8", "surrogatepass")) if said is None else said


def stand_ins(data: bytes, size: int | None = None) -> Tokens:
    """Numbers for a text of which no tokens are known; ``data`` is its beginning if it has ``size`` bytes."""
    told = min(len(data) // CHARACTERS_PER_TOKEN, MOST_TOLD)
    counted = min((len(data) if size is None else size) // CHARACTERS_PER_TOKEN, MOST_TOKENS)
    return unpack_from(f"<{told}I", data) + (0,) * (counted - told)


def token_ids(given: object) -> Tokens | None:
    """A prompt that is given as token ids; None if it is not."""
    if not isinstance(given, list) or not given or type(cast("list[Any]", given)[0]) is not int:
        return None
    items = cast("list[Any]", given)
    try:
        told = array("I", items[:MOST_TOLD])
    except (TypeError, OverflowError):
        return None
    return tuple(told) + (0,) * (min(len(items), MOST_TOKENS) - len(told))


def plain_text(call: OpenAICall) -> str:
    """A call's text, in its order."""
    body = call.body
    if body.messages is not None:
        return "\n".join(_texts(body.messages))
    given = body.prompt if body.prompt is not None else body.input
    return "\n".join(_texts([body.instructions, given]))


def _texts(content: object) -> Iterator[str]:
    """The strings in nested strings, parts, messages and lists of these; what is none of them is nothing."""
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
