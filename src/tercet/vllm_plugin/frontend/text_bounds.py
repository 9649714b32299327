"""Size limit for all texts that are tokenised, and tokens that become text.

vLLM limits prompts by the model's length, but not the input of ``/tokenize`` and its like: 20 MB there cost 5 GB and 20
s of a thread that nothing stops, and that prompts of others wait for. The answer of ``/tokenize`` names every token,
and the event loop writes it at once: 500,000 tokens took it 130 ms.

Relies on a renderer doing all of it by its ``_tokenize_prompt`` and ``_detokenize_prompt``, and their ``_async`` forms,
and on ``/tokenize`` alone having no ``max_total_tokens``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.exceptions import VLLMValidationError

LEAST = 1024 * 1024
"""Characters, and tokens, that are always accepted."""
PER_TOKEN = 16
"""Characters for each token of the model's length; few texts have more."""
LEAST_LISTED = 128 * 1024
"""Tokens that an answer may always list."""


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
    """``prompt``, unless its tokens are for an answer that lists them and are more than ``listed``."""
    tokens = len(prompt["prompt_token_ids"])
    if params.max_total_tokens is None and tokens > listed:
        raise VLLMValidationError(
            f"prompt: has {tokens} tokens; this server lists at most {listed} at once", parameter="prompt"
        )
    return prompt


def _bounded(call: Callable[..., Any], part: str, unit: str, most: int) -> Callable[..., Any]:
    """``call``, or the awaitable that it returns, for prompts whose ``part`` is not too long."""

    def bounded(prompt: Any, *args: Any) -> Any:
        if len(prompt[part]) > most:
            raise VLLMValidationError(
                f"prompt: has {len(prompt[part])} {unit}; this server accepts at most {most} at once",
                parameter="prompt",
            )
        return call(prompt, *args)

    return bounded
