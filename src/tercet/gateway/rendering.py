"""A prompt's tokens without an engine: chat template and tokenizer, or an estimate by characters.

What comes out names blocks of a prefix index, and says how long a prompt is; nothing is ever generated from it. So it
may be off, at the cost of a worse pick.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, cast

import jinja2.sandbox
import msgspec
import numpy as np
from jinja2.ext import loopcontrols
from tokenizers import Tokenizer

from tercet.gateway.openai_call import OpenAICall
from tercet.protocol import BadRequest

logger = logging.getLogger("tercet.gateway")
CHARACTERS_PER_TOKEN = 4
SEGMENT = 2048
"""Characters that are tokenized, and remembered, together."""
REMEMBERED_SEGMENTS = 50_000
Tokens = tuple[int, ...]


class Renderer(Protocol):
    """Makes tokens of calls."""

    def tokens(self, call: OpenAICall) -> Tokens:
        """The prompt's tokens, or as many stand-ins as there are about; none where the call has no prompt."""
        ...


# ---- by characters -------------------------------------------------------------------------------------------


class ByCharacters:
    """Four bytes of text are a token, whose number they are: equal prompts are equal, and their length is about right.

    Such tokens match nothing that engines say they hold, only what was routed where.
    """

    def tokens(self, call: OpenAICall) -> Tokens:
        body = call.body
        given = body.prompt if body.prompt is not None else body.input
        if body.messages is None and is_token_ids(given):
            return tuple(cast("Sequence[int]", given))
        return stand_ins(plain_text(call))


def stand_ins(text: str) -> Tokens:
    """Numbers for a text of which no tokens are known."""
    data = text.encode("utf-8", "surrogatepass")
    whole = len(data) // CHARACTERS_PER_TOKEN * CHARACTERS_PER_TOKEN
    return tuple(np.frombuffer(data[:whole], dtype="<u4").tolist())


def is_token_ids(given: object) -> bool:
    """Whether a prompt is given as token ids."""
    if not isinstance(given, list) or not given:
        return False
    items = cast("list[Any]", given)
    return type(items[0]) is int and all(type(item) is int and 0 <= item < 2**32 for item in items)


def plain_text(call: OpenAICall) -> str:
    """All of a call's text, in its order."""
    body = call.body
    if body.messages is not None:
        return "\n".join(f"{message.get('role')}: {_text(message.get('content'))}" for message in body.messages)
    given = body.prompt if body.prompt is not None else body.input
    said = _text(given)
    return f"{body.instructions}\n{said}" if body.instructions else said


def _text(content: object) -> str:
    """A string, or the texts in a list of strings, parts and messages; what is neither is nothing."""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        part = cast("Mapping[str, Any]", content)
        return _text(part.get("text", part.get("content")))
    if isinstance(content, Sequence):
        return "\n".join(_text(part) for part in cast("Sequence[object]", content))
    return ""


# ---- as the model --------------------------------------------------------------------------------------------


class CannotRender(Exception):
    """This call's prompt is more than the text that is known of it."""


class ModelRenderer:
    """Tokens by the tokenizer and the chat template of a checkpoint in ``directory``.

    For one call about ``budget`` characters that were not seen lately are tokenized: the rest of a long prompt that is
    new gets stand-ins. What cannot be rendered (pictures, templates that fail) gets stand-ins as a whole.
    Raises :class:`~tercet.protocol.BadRequest` where there is no tokenizer.
    """

    def __init__(self, directory: Path, budget: int = 8 * SEGMENT) -> None:
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise BadRequest(f"render-model: {directory} has no tokenizer.json", "render-model")
        self._tokenizer = Tokenizer.from_file(str(file))
        self._budget = budget
        config = directory / "tokenizer_config.json"
        self._config: dict[str, Any] = msgspec.json.decode(config.read_bytes()) if config.is_file() else {}
        self._template = _template_of(directory, self._config)
        self._seen: OrderedDict[str, Tokens] = OrderedDict()
        self._otherwise = ByCharacters()
        self._told: set[str] = set()

    def tokens(self, call: OpenAICall) -> Tokens:
        body = call.body
        if body.messages is None and is_token_ids(body.prompt):
            return self._otherwise.tokens(call)
        try:
            return self._tokenized(*self._text_of(call))
        except (CannotRender, jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            self._say_once(str(error) or type(error).__name__)
            return self._otherwise.tokens(call)

    def _text_of(self, call: OpenAICall) -> tuple[str, bool]:
        """The prompt as the engine's own serving layer would write it, and whether special tokens are to be added."""
        body = call.body
        if body.messages is not None:
            return self._chat([_flat(message) for message in body.messages], call), False
        if body.input is not None:
            system = [{"role": "system", "content": body.instructions}] if body.instructions else []
            said = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
            return self._chat([*system, *(_flat(message) for message in said)], call), False
        if isinstance(body.prompt, str):
            return body.prompt, True
        raise CannotRender("a list of prompts")

    def _chat(self, messages: Sequence[Mapping[str, Any]], call: OpenAICall) -> str:
        if self._template is None:
            raise CannotRender("the checkpoint has no chat template")
        named = {name: _token(self._config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        given = {**named, "add_generation_prompt": True, **(call.body.chat_template_kwargs or {})}
        return self._template.render(messages=messages, tools=call.body.tools or None, documents=None, **given)

    def _tokenized(self, text: str, add_special_tokens: bool) -> Tokens:
        """By segments, so that the beginning of a conversation costs nothing when it comes again with its next turn."""
        tokens: list[int] = []
        left, start, first = self._budget, 0, add_special_tokens
        while start < len(text):
            end = _segment_end(text, start)
            # The first segment may be another one's text with special tokens around it.
            name = text[start:end] + ("\0" if first else "")
            known = self._seen.get(name)
            if known is not None:
                self._seen.move_to_end(name)
            elif left <= 0:
                return (*tokens, *stand_ins(text[start:]))
            else:
                left -= end - start
                known = tuple(self._tokenizer.encode(text[start:end], add_special_tokens=first).ids)
                self._remember(name, known)
            tokens += known
            start, first = end, False
        return tuple(tokens)

    def _remember(self, name: str, tokens: Tokens) -> None:
        self._seen[name] = tokens
        if len(self._seen) > REMEMBERED_SEGMENTS:
            self._seen.popitem(last=False)

    def _say_once(self, why: str) -> None:
        if why not in self._told and len(self._told) < 100:
            self._told.add(why)
            logger.warning("rendering: by characters instead: %s", why)


def _segment_end(text: str, start: int) -> int:
    """Where a segment ends: before the last blank in it, where tokenizers cut anyhow. It depends on what is before."""
    end = start + SEGMENT
    if end >= len(text):
        return len(text)
    blank = text.rfind(" ", start + SEGMENT // 2, end)
    return blank if blank > start else end


def _flat(message: object) -> Mapping[str, Any]:
    """A message whose content is text, as chat templates take it."""
    if not isinstance(message, Mapping):
        raise CannotRender("a message that is no mapping")
    fields = dict(cast("Mapping[str, Any]", message))
    content = fields.get("content")
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):  # pyright: ignore[reportUnknownMemberType]
            raise CannotRender("content that is not text")
        fields["content"] = "\n".join(part["text"] for part in parts)
    return fields


def _token(declared: object) -> str:
    """A special token as its configuration has it: a string, or a mapping with its content."""
    if isinstance(declared, Mapping):
        declared = cast("Mapping[str, object]", declared).get("content")
    return declared if isinstance(declared, str) else ""


def _template_of(directory: Path, config: Mapping[str, Any]) -> jinja2.Template | None:
    """The checkpoint's chat template, in the environment that such templates are written for."""
    file = directory / "chat_template.jinja"
    source = file.read_text() if file.is_file() else config.get("chat_template")
    if not isinstance(source, str):
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _as_json
    cast("dict[str, Any]", environment.globals).update(raise_exception=_complain, strftime_now=_now)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise BadRequest(f"render-model: the chat template of {directory}: {error}", "render-model") from error


def _as_json(value: object, indent: int | None = None) -> str:
    encoded = msgspec.json.encode(value)
    return msgspec.json.format(encoded, indent=indent or 0).decode()


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _complain(message: str) -> None:
    raise jinja2.TemplateError(message)
