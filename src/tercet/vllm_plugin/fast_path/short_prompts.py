"""Rendering of short prompts and chats on the event loop, without the layers of ``transformers``' tokenizers.

vLLM passes every prompt to a thread, and to a task for each step; a chat's template gets a thread and a timeout in
addition. For a short prompt, this costs more than the rendering itself; under load, the thread waits for the
interpreter's lock for longer than the event loop would be blocked. Much of the remaining time is spent in
``transformers``, in the code around its inner tokenizer of ``tokenizers``.

Relies on a renderer tokenising a text prompt with its ``_tokenize_prompt_async``, which wraps ``_tokenize_prompt``; on
``render_cmpl`` and ``render_cmpl_async`` returning the same, and, without media, ``render_chat`` and
``render_chat_async``; on ``get_eos_token_id`` always returning the same; on ``ChatParams`` having
``chat_template_kwargs``; on ``get_encode_kwargs`` returning the options of a tokenizer's call, which are only
``truncation``, ``max_length`` and ``add_special_tokens``; and on a tokenizer of ``transformers`` returning the result
of its ``_tokenizer`` without truncation and padding: this is tested at the start.
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
# The keys of a text-only prompt, and the types of text in a message's content, as vLLM parses them.
TEXT = {"prompt"}
TEXT_PARTS = {"text", "input_text", "output_text"}
KNOWN_OPTIONS = {"truncation", "max_length", "add_special_tokens"}
TRIED = ("", "Hello, w\u00f6rld!", " two  spaces\n\tand \U0001f680 <|im_start|>user</s> ", "x" * 50)


def render_short_prompts_here(renderer: Any, *, trusts_templates: bool = False) -> None:
    """Make ``renderer`` render short prompts and chats on the event loop, and only longer ones in a thread.

    If the server ``trusts_templates`` of its clients, chats stay in a thread: a client's template may run for long.
    """
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

    async def render_conversation(conversations: Sequence[Any], params: Any, *args: Any, **kwargs: Any) -> Any:
        if len(conversations) == 1 and is_short_chat(conversations[0], params.chat_template_kwargs):
            return render_chat(conversations, params, *args, **kwargs)
        return await render_chat_in_tasks(conversations, params, *args, **kwargs)

    # For ``render_cmpl`` and ``render_chat``; ``in_thread`` has the original.
    renderer._tokenize_prompt = here
    renderer._tokenize_prompt_async, renderer.render_cmpl_async = tokenize, render_completion
    # vLLM asks for it with every request, and ``transformers`` looks it up in the vocabulary each time.
    eos_token_id = renderer.get_eos_token_id()
    renderer.get_eos_token_id = lambda: eos_token_id
    if not trusts_templates:
        render_chat, render_chat_in_tasks = renderer.render_chat, renderer.render_chat_async
        renderer.render_chat_async = render_conversation


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


def is_short_chat(messages: Any, template_kwargs: Any) -> bool:
    """True if ``messages`` and the data for their template, as tools, are short, and the messages have only text."""
    return isinstance(messages, list) and _is_short_json([messages, template_kwargs]) and all(map(_is_text, messages))


def _is_short_json(values: list[Any]) -> bool:
    """True if ``values`` are JSON whose texts, numbers and lists have at most ``SHORT`` characters and elements."""
    waiting, left = values, SHORT
    while waiting:
        value = waiting.pop()
        if isinstance(value, (str, dict, list)):
            left -= len(value)
        elif value is None or isinstance(value, (bool, int, float)):
            left -= 1
        else:
            return False
        if left < 0:
            return False
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += [None, *value]
    return True


def _is_text(message: Any) -> bool:
    """True if a message's content is text, or a list of texts."""
    content = message.get("content") if isinstance(message, dict) else ()
    if isinstance(content, list):
        return all(isinstance(part, str) or _is_text_part(part) for part in content)
    return content is None or isinstance(content, str)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] in TEXT_PARTS
