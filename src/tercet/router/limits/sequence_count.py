"""The number of sequences that a request asks for, counted before any of them begins: prompts times choices.

Invalid values are not counted, since vLLM refuses them. A count that is wrong here, because a route uses other fields,
is corrected as sequences begin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from tercet.protocol import BadRequest

# Fields whose items are one sequence each, and their paths; SageMaker's path accepts the bodies of several others.
LISTS = (
    ("prompt", "/v1/completions"), ("prompt_embeds", "/v1/completions"), ("messages", "/v1/chat/completions/batch"),
    ("items", "/generative_scoring"), ("questions", "/v1/systemone"),
)  # fmt: skip
ANY = "/invocations"
_FIELDS_OF = {path: [name for name, where in LISTS if where == path] for _, path in LISTS} | {
    ANY: [name for name, _ in LISTS]
}


def require_few_sequences(path: str, fields: Mapping[str, Any] | None, most: int) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if a body asks for more than ``most`` sequences."""
    if fields is None:
        return
    prompts, choices = _prompts(path, fields), max(_choices(fields), _choices(fields.get("sampling_params")))
    if prompts * choices <= most:
        return
    field = "n" if choices > 1 else next(name for name, _ in LISTS if _length(fields.get(name)) == prompts)
    raise BadRequest(
        f"{field}: the request asks for {prompts * choices} sequences ({prompts} prompts, {choices} choices each), "
        f"and this router allows {most} per request (max-sequences); send several requests",
        field,
    )


def _prompts(path: str, fields: Mapping[str, Any]) -> int:
    return max([_length(fields.get(name)) for name in _FIELDS_OF.get(path, ())], default=1)


def _length(found: Any) -> int:
    """Return the number of prompts in a field; a list of tokens or of messages is one prompt."""
    if isinstance(found, dict):
        return len(cast("dict[str, Any]", found))
    if not isinstance(found, list):
        return 1
    items = cast("list[Any]", found)
    return 1 if not items or isinstance(items[0], (int, dict)) else len(items)


def _choices(fields: Any) -> int:
    """Return the value of ``n`` in any form that vLLM accepts; 1 without a valid value."""
    if not isinstance(fields, dict) or "n" not in fields:
        return 1
    try:
        return max(1, msgspec.convert(cast("dict[str, Any]", fields)["n"], int, strict=False))
    except msgspec.ValidationError:
        return 1
