"""How many sequences a request asks for, before any of them is made: prompts times choices.

What vLLM does not take is not counted: it refuses that by itself. What is counted wrong here, since a route says it in
another way, is counted again as sequences begin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from tercet.protocol import BadRequest

# Fields of which each item is a sequence, and where; SageMaker's path takes the bodies of several others.
LISTS = (
    ("prompt", "/v1/completions"), ("prompt_embeds", "/v1/completions"), ("messages", "/v1/chat/completions/batch"),
    ("items", "/generative_scoring"), ("questions", "/v1/systemone"),
)  # fmt: skip
ANY = "/invocations"


def require_few_sequences(path: str, fields: Mapping[str, Any] | None, most: int) -> None:
    """Raises :class:`~tercet.protocol.BadRequest` if a body asks for more than ``most``."""
    if fields is None:
        return
    prompts, choices = _prompts(path, fields), max(_choices(fields), _choices(fields.get("sampling_params")))
    if prompts * choices <= most:
        return
    field = "n" if choices > 1 else next(name for name, _ in LISTS if _length(fields.get(name)) == prompts)
    raise BadRequest(
        f"{field}: the request asks for {prompts * choices} sequences ({prompts} prompts, {choices} choices of each), "
        f"and this router takes {most} of one request (max-sequences); send several requests",
        field,
    )


def _prompts(path: str, fields: Mapping[str, Any]) -> int:
    return max((_length(fields.get(name)) for name, where in LISTS if path in (where, ANY)), default=1)


def _length(found: Any) -> int:
    """Of a list of prompts, or of questions by name; one that is a list of tokens or of messages is one."""
    if isinstance(found, Mapping):
        return len(cast("Mapping[Any, Any]", found))
    if not isinstance(found, list):
        return 1
    items = cast("list[Any]", found)
    return 1 if not items or isinstance(items[0], (int, Mapping)) else len(items)


def _choices(fields: Any) -> int:
    """What ``n`` says, in whatever form vLLM takes it."""
    if not isinstance(fields, Mapping):
        return 1
    try:
        return max(1, msgspec.convert(cast("Mapping[str, Any]", fields).get("n", 1), int, strict=False))
    except msgspec.ValidationError:
        return 1
