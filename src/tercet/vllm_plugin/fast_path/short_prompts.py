"""Tokenisation of short prompts on the event loop, without the layers of ``transformers``.

vLLM passes every prompt to a thread, and to a task for each step. For a short prompt, this costs more than the
tokenisation itself; under load, the thread waits for the interpreter's lock for longer than the event loop would be
blocked. Much of the remaining time is spent in ``transformers``, in the code around its inner tokenizer of
``tokenizers``.

Relies on a renderer tokenising a text prompt with its ``_tokenize_prompt_async``, which wraps ``_tokenize_prompt``, and
on ``render_cmpl`` and ``render_cmpl_async`` returning the same result; on ``get_encode_kwargs`` returning the options
of a tokenizer's call, which are only ``truncation``, ``max_length`` and ``add_special_tokens``; and on a tokenizer of
``transformers`` returning the result of its ``_tokenizer`` without truncation and padding: this is tested at the start.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

from transformers import TokenizersBackend

logger = logging.getLogger(__name__)
Encode = Callable[[str, bool], list[int]]
"""A function from a text, and whether to add special tokens, to token ids."""

# Characters; the built-in model's tokeniser needs 0.5 ms for a text of this length.
SHORT = 1000
# The keys of a text-only prompt, as vLLM parses it.
TEXT = {"prompt"}
KNOWN_OPTIONS = {"truncation", "max_length", "add_special_tokens"}
TRIED = ("", "Hello, w\u00f6rld!", " two  spaces\n\tand \U0001f680 <|im_start|>user</s> ", "x" * 50)


def render_short_prompts_here(renderer: Any) -> None:
    """Make ``renderer`` tokenise short prompts on the event loop, and only longer prompts in a thread."""
    in_thread, as_vllm_does = renderer._tokenize_prompt_async, renderer._tokenize_prompt
    encode = encoder_of(renderer.tokenizer)
    render_in_tasks, render = renderer.render_cmpl_async, renderer.render_cmpl

    def here(prompt: Any, params: Any) -> Any:
        ids = None
        if encode is not None and _is_short_text(prompt) and not params.return_token_offsets:
            ids = _encoded(encode, prompt["prompt"], params.get_encode_kwargs())
        return as_vllm_does(prompt, params) if ids is None else {"prompt_token_ids": ids, **prompt}

    async def tokenize(prompt: Any, params: Any) -> Any:
        return here(prompt, params) if len(prompt["prompt"]) <= SHORT else await in_thread(prompt, params)

    async def render_completion(prompts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if len(prompts) == 1 and _is_short_text(prompts[0]):
            return render(prompts, *args, **kwargs)
        return await render_in_tasks(prompts, *args, **kwargs)

    renderer._tokenize_prompt = here  # for ``render_cmpl``; ``in_thread`` has the original
    renderer._tokenize_prompt_async, renderer.render_cmpl_async = tokenize, render_completion


def encoder_of(tokenizer: Any) -> Encode | None:
    """Return the inner encoder of a ``transformers`` tokenizer; None if the tokenizer's results differ from it."""
    if not isinstance(tokenizer, TokenizersBackend):
        return None
    # A copy, since other code switches truncation on and off in the original.
    backend: Any = copy.deepcopy(tokenizer._tokenizer)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    for special in (False, True):
        if any(encode(text, special) != list(tokenizer(text, add_special_tokens=special).input_ids) for text in TRIED):
            logger.warning("the tokenizer's results differ from its inner tokenizer's: short prompts cost more")
            return None
    return encode


def _encoded(encode: Encode, text: str, options: dict[str, Any]) -> list[int] | None:
    """Return the ids of a text; None if the options are unknown, or if they truncate it."""
    if options.keys() != KNOWN_OPTIONS:
        return None
    ids, most = encode(text, options["add_special_tokens"]), options["max_length"]
    return ids if not options["truncation"] or len(ids) <= most else None


def _is_short_text(prompt: Any) -> bool:
    return isinstance(prompt, dict) and prompt.keys() == TEXT and len(prompt["prompt"]) <= SHORT
