"""Size limits for texts that are tokenised, and for tokens that are converted to text.

vLLM limits prompts by the model's length, but not the input of ``/tokenize`` and similar routes. An input of 20 MB
needs 5 GB of memory and 20 s of a thread, which cannot be cancelled and delays the prompts of other requests. The
answer of ``/tokenize`` lists every token, and the event loop writes it in one step: 500,000 tokens took 130 ms.

Relies on a renderer doing all of this with ``_tokenize_prompt`` and ``_detokenize_prompt``, and their ``_async`` forms,
and on ``/tokenize`` being the only route without ``max_total_tokens``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.exceptions import VLLMValidationError

LEAST = 1024 * 1024
"""Number of characters, or of tokens, that is always accepted."""
PER_TOKEN = 16
"""Number of characters accepted for each token of the model's length; few texts have more per token."""
LEAST_LISTED = 128 * 1024
"""Number of tokens that an answer may always list."""


def bound_texts(renderer: Any, max_model_len: int) -> None:
    """Make ``renderer`` refuse input that is longer than any prompt for ``max_model_len`` tokens."""
    most = max(LEAST, PER_TOKEN * max_model_len)
    listed = max(LEAST_LISTED, 2 * max_model_len)
    by_text = "prompt", "characters", most
    by_ids = "prompt_token_ids", "tokens", most
    tokenize, tokenize_async = renderer._tokenize_prompt, renderer._tokenize_prompt_async

    def listed_tokenize(prompt: Any, params: Any) -> Any:
        return _require_short(tokenize(prompt, params), params, listed)

    async def listed_tokenize_async(prompt: Any, params: Any) -> Any:
        return _require_short(await tokenize_async(prompt, params), params, listed)

    renderer._tokenize_prompt = _bounded(listed_tokenize, *by_text)
    renderer._tokenize_prompt_async = _bounded(listed_tokenize_async, *by_text)
    renderer._detokenize_prompt = _bounded(renderer._detokenize_prompt, *by_ids)
    renderer._detokenize_prompt_async = _bounded(renderer._detokenize_prompt_async, *by_ids)


def _require_short(prompt: Any, params: Any, listed: int) -> Any:
    """Return ``prompt``; raise ``VLLMValidationError`` if an answer would list more than ``listed`` of its tokens."""
    tokens = len(prompt["prompt_token_ids"])
    if params.max_total_tokens is None and tokens > listed:
        raise VLLMValidationError(
            f"prompt: has {tokens} tokens; this server lists at most {listed} at once", parameter="prompt"
        )
    return prompt


def _bounded(call: Callable[..., Any], part: str, unit: str, most: int) -> Callable[..., Any]:
    """Wrap ``call``: raise ``VLLMValidationError`` for a prompt whose ``part`` is longer than ``most``."""

    def bounded(prompt: Any, *args: Any) -> Any:
        if len(prompt[part]) > most:
            raise VLLMValidationError(
                f"prompt: has {len(prompt[part])} {unit}; this server accepts at most {most} at once",
                parameter="prompt",
            )
        return call(prompt, *args)

    return bounded
