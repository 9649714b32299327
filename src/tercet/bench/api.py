"""The two OpenAI endpoints that stream: their paths and request bodies. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

Endpoint = Literal["completions", "chat"]
PromptAs = Literal["tokens", "text"]
Message = dict[str, str]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters that are sent with every request; ``extra`` goes into the body as it is."""

    temperature: float = 0.0
    top_p: float | None = None
    ignore_eos: bool = True
    extra: Mapping[str, Any] = {}


def path_of(endpoint: Endpoint) -> str:
    """Path under the server's base URL."""
    return "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"


def body_of(
    model: str,
    prompt: Sequence[int] | str | Sequence[Message],
    max_tokens: int,
    sampling: Sampling,
    *,
    chat: bool,
    token_ids: bool = False,
    cache_salt: str | None = None,
) -> bytes:
    """The JSON body of a streamed request.

    ``token_ids`` asks for the ids of the answer (vLLM). ``cache_salt`` keeps the request's prefix from matching those
    of other salts (vLLM). ``ignore_eos`` is vLLM's as well, and left out when it is not wanted.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages" if chat else "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if sampling.top_p is not None:
        body["top_p"] = sampling.top_p
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if token_ids:
        body["return_token_ids"] = True
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    return msgspec.json.encode(body | dict(sampling.extra))
