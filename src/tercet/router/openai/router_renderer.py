"""The renderer of a router, which makes tokens of prompts and texts of tokens: a subclass of each of vLLM's renderers.

It differs from vLLM's own in three ways. Each class below has one, and can be understood alone:

- :class:`BoundedTexts` refuses input that is longer than any prompt. vLLM limits prompts by the model's length, but not
  the input of ``/tokenize`` and similar routes. An input of 20 MB needs 5 GB of memory and 20 s of a thread, which
  cannot be cancelled and delays the prompts of other requests. The answer of ``/tokenize`` lists every token, and the
  event loop writes it in one step: 500,000 tokens took 130 ms.
- :class:`ShortPrompts` renders short prompts and chats on the event loop. vLLM passes every prompt to a thread, and to
  a task for each step; a chat's template gets a thread and a timeout in addition. For a short prompt, this costs more
  than the rendering itself; under load, the thread waits for the interpreter's lock for longer than the event loop
  would be blocked. Much of the remaining time is spent in ``transformers``, in the code around its inner tokenizer of
  ``tokenizers``. Only a router with a fast path switches it on.
- :class:`RouterRenderer` keeps images for the engines, and shortens the names that clients give to them.

Relies on the renderers' registry, which takes a module and the name of a class for each kind of tokenizer; on a
renderer making all tokens with ``_tokenize_prompt``, of which it makes ``_tokenize_prompt_async`` when it is created,
and all texts with ``_detokenize_prompt`` and its ``_async`` form; on ``/tokenize`` being the only route without
``max_total_tokens``; on ``render_cmpl`` and ``render_cmpl_async`` returning the same, and, without media,
``render_chat`` and ``render_chat_async``; on ``get_eos_token_id`` always returning the same; on ``ChatParams`` having
``chat_template_kwargs``; on ``get_encode_kwargs`` returning the options of a tokenizer's call, which are only
``truncation``, ``max_length`` and ``add_special_tokens``; and on a tokenizer of ``transformers`` returning the result
of its ``_tokenizer`` without truncation and padding: this is tested at the start.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers import TokenizersBackend
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.cache import MultiModalProcessorOnlyCache
from vllm.renderers.registry import RENDERER_REGISTRY

from tercet.vllm_plugin.hooks import handed_in, original_of
from tercet.vllm_plugin.mm_features import with_short_names

if TYPE_CHECKING:
    from vllm.renderers.base import BaseRenderer as Renderer
else:
    # The classes here stand on top of any of vLLM's renderers.
    Renderer = object

logger = logging.getLogger(__name__)
Encode = Callable[[str, bool], list[int]]
"""A function from a text, and whether to add special tokens, to token ids."""

LEAST = 1024 * 1024
"""Number of characters, or of tokens, that is always accepted."""
PER_TOKEN = 16
"""Number of characters accepted for each token of the model's length; few texts have more per token."""
LEAST_LISTED = 128 * 1024
"""Number of tokens that an answer may always list."""
# Characters; the built-in model's tokeniser needs 0.5 ms for a text of this length.
SHORT = 1000
# The keys of a text-only prompt, and the types of text in a message's content, as vLLM parses them.
TEXT = {"prompt"}
TEXT_PARTS = {"text", "input_text", "output_text"}
KNOWN_OPTIONS = {"truncation", "max_length", "add_special_tokens"}
TRIED = ("", "Hello, w\u00f6rld!", " two  spaces\n\tand \U0001f680 <|im_start|>user</s> ", "x" * 50)


@contextmanager
def own_renderers() -> Generator[None]:
    """Make the renderers that vLLM creates while entered a router's."""
    renderers = RENDERER_REGISTRY.renderers
    vllms = dict(renderers)
    for kind, (module, name) in vllms.items():
        here, _, attribute = handed_in(__name__, f"{module}.{name}").rpartition(".")
        renderers[kind] = here, attribute
    try:
        yield
    finally:
        renderers.update(vllms)


@functools.cache
def __getattr__(name: str) -> type:
    renderer = original_of(name)
    return type(renderer.__name__, (RouterRenderer, renderer), {})


# ---- bounds of texts and tokens ----------------------------------------------------------------------------------


class BoundedTexts(Renderer):
    """Raises ``VLLMValidationError`` for input that is longer than any prompt of its model."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        length = config.model_config.max_model_len
        self._most, self._most_listed = max(LEAST, PER_TOKEN * length), max(LEAST_LISTED, 2 * length)
        super().__init__(config, tokenizer)

    def _tokenize_prompt(self, prompt: Any, params: Any) -> Any:
        self._require_short(prompt["prompt"], "characters")
        tokenized = super()._tokenize_prompt(prompt, params)
        tokens = len(tokenized["prompt_token_ids"])
        # A prompt to generate from has its own limit. What remains is an answer that lists the tokens.
        if params.max_total_tokens is None and tokens > self._most_listed:
            raise VLLMValidationError(
                f"prompt: has {tokens} tokens; this server lists at most {self._most_listed} at once",
                parameter="prompt",
            )
        return tokenized

    def _detokenize_prompt(self, prompt: Any) -> Any:
        self._require_short(prompt["prompt_token_ids"], "tokens")
        return super()._detokenize_prompt(prompt)

    async def _detokenize_prompt_async(self, prompt: Any) -> Any:
        self._require_short(prompt["prompt_token_ids"], "tokens")
        return await super()._detokenize_prompt_async(prompt)

    def _require_short(self, given: Any, unit: str) -> None:
        if len(given) > self._most:
            raise VLLMValidationError(
                f"prompt: has {len(given)} {unit}; this server accepts at most {self._most} at once", parameter="prompt"
            )


# ---- short prompts on the event loop -----------------------------------------------------------------------------


class ShortPrompts(Renderer):
    """Renders short prompts and chats where it is called, once :meth:`render_short_prompts_here` was."""

    _encode: Encode | None = None
    _prompts_here = _chats_here = False
    _eos_token_id: int | None = None

    def render_short_prompts_here(self, *, trusts_templates: bool = False) -> None:
        """Render short prompts and chats on the event loop from now on, and only longer ones in a thread.

        If the server ``trusts_templates`` of its clients, chats stay in a thread: a client's template may run for long.
        """
        in_thread = self._tokenize_prompt_async

        async def tokenize(prompt: Any, params: Any) -> Any:
            if len(prompt["prompt"]) <= SHORT:
                return self._tokenize_prompt(prompt, params)
            return await in_thread(prompt, params)

        # vLLM creates its own one with each renderer, so a method of this class would not be called.
        self._tokenize_prompt_async = tokenize
        self._encode = encoder_of(self.tokenizer)
        # vLLM asks for it with every request, and ``transformers`` looks it up in the vocabulary each time.
        self._eos_token_id = super().get_eos_token_id()
        self._prompts_here, self._chats_here = True, not trusts_templates

    def get_eos_token_id(self) -> int | None:
        return self._eos_token_id if self._prompts_here else super().get_eos_token_id()

    def _tokenize_prompt(self, prompt: Any, params: Any) -> Any:
        if self._encode is not None and _is_short_text(prompt) and not params.return_token_offsets:
            options = params.get_encode_kwargs()
            if options.keys() == KNOWN_OPTIONS:
                ids = self._encode(prompt["prompt"], options["add_special_tokens"])
                if not options["truncation"] or len(ids) <= options["max_length"]:
                    return {"prompt_token_ids": ids, **prompt}
        return super()._tokenize_prompt(prompt, params)

    async def render_cmpl_async(self, prompts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if self._prompts_here and len(prompts) == 1 and _is_short_text(prompts[0]):
            return self.render_cmpl(prompts, *args, **kwargs)
        return await super().render_cmpl_async(prompts, *args, **kwargs)

    async def render_chat_async(self, conversations: Sequence[Any], params: Any, *args: Any, **kwargs: Any) -> Any:
        here = self._chats_here and len(conversations) == 1 and isinstance(conversations[0], list)
        # Also the data for the template, such as tools, must be short; and all content text: images would be fetched.
        if (
            here
            and _is_short_json([conversations[0], params.chat_template_kwargs])
            and all(map(_is_text, conversations[0]))
        ):
            return self.render_chat(conversations, params, *args, **kwargs)
        return await super().render_chat_async(conversations, params, *args, **kwargs)


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


def _is_short_text(prompt: Any) -> bool:
    return isinstance(prompt, dict) and prompt.keys() == TEXT and len(prompt["prompt"]) <= SHORT


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
        parts = (part for part in content if not isinstance(part, str))
        return all(isinstance(x, dict) and x.keys() == {"type", "text"} and x["type"] in TEXT_PARTS for x in parts)
    return content is None or isinstance(content, str)


# ---- images, and the whole ---------------------------------------------------------------------------------------


class RouterRenderer(ShortPrompts, BoundedTexts):
    """A router's renderer; the class of vLLM's to which its model's tokenizer belongs is its last base class."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        if self.mm_processor_cache is not None:
            # vLLM's own cache drops tensors once an engine has them, but here another engine may need them next.
            self._mm_processor_cache = MultiModalProcessorOnlyCache(config.model_config)

    def _process_mm_uuids(self, *given: Any, **named: Any) -> Any:
        return with_short_names(super()._process_mm_uuids(*given, **named))
