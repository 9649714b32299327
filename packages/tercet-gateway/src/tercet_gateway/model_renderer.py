"""The tokens of a prompt as its engine would make them: by the checkpoint's chat template and tokenizer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import jinja2.sandbox
import msgspec
from jinja2.ext import loopcontrols
from tokenizers import Tokenizer

from tercet.protocol import BadRequest
from tercet.protocol.json_text import UNREADABLE
from tercet_gateway.openai_call import OpenAICall
from tercet_gateway.rendering import Tokens, estimated, token_ids
from tercet_gateway.segments import SEGMENT, SegmentTokenizer

logger = logging.getLogger("tercet.gateway")
MANY_MESSAGES = 64
"""Number of messages above which a thread fills in the template, while other requests are served."""
MOST_RENDERING = 8
"""Most prompts in that thread, including those that wait for it; further prompts are estimated."""
LONGEST_REASON = 300


class CannotRender(Exception):
    """An error for a call whose prompt has parts that cannot be rendered here."""


def tokenizer_file(directory: Path) -> Path:
    """Return a checkpoint's tokenizer file. Raises :class:`~tercet.protocol.BadRequest` if it does not exist."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise BadRequest(f"render-model: {directory} has no tokenizer.json", "render-model")
    return file


class ModelRenderer:
    """A renderer that uses the tokenizer and the chat template of a checkpoint in ``directory``.

    ``budget`` and ``most_bytes`` are as for :class:`~tercet_gateway.segments.SegmentTokenizer`. A prompt that cannot be
    rendered (pictures, failing templates and tokenizers) gets stand-ins as a whole. Raises
    :class:`~tercet.protocol.BadRequest` if the checkpoint's tokenizer or chat template cannot be read.
    """

    def __init__(self, directory: Path, budget: int = 8 * SEGMENT, most_bytes: int = 128 * 2**20) -> None:
        file = tokenizer_file(directory)
        try:
            tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no other class
            raise BadRequest(f"render-model: {file} is not a tokenizer: {error}", "render-model") from error
        self._config = _config_of(directory)
        self._template = _template_of(directory, self._config)
        self.segments = SegmentTokenizer(tokenizer, budget, most_bytes)
        self._rendering = 0
        self._told: set[str] = set()

    def close(self) -> None:
        """Close the tokenizer; no more calls may follow."""
        self.segments.close()

    async def tokens(self, call: OpenAICall) -> Tokens:
        if call.opening or (call.body.messages is None and token_ids(call.body.prompt) is not None):
            return estimated(call)
        try:
            return await self.segments.tokens(*await self._text_of(call))
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a template may raise any error, and a tokenizer's panics are not Exceptions
            self._say_once(str(error) or type(error).__name__)
            return estimated(call)

    async def _text_of(self, call: OpenAICall) -> tuple[str, bool]:
        """Return the result of :meth:`_written`, from a thread if it may take long."""
        many = call.body.messages if call.body.messages is not None else call.body.input
        if many is None or isinstance(many, str) or len(many) <= MANY_MESSAGES:
            return self._written(call)
        if self._rendering >= MOST_RENDERING:
            raise CannotRender("too many long conversations at once")
        self._rendering += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(None, self._written, call)
        finally:
            self._rendering -= 1

    def _written(self, call: OpenAICall) -> tuple[str, bool]:
        """Return the prompt as the engine's serving layer would write it, and whether special tokens are added."""
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

    def _say_once(self, why: str) -> None:
        why = why[:LONGEST_REASON]
        if why not in self._told and len(self._told) < 100:
            self._told.add(why)
            logger.warning("a prompt cannot be rendered, so its tokens are estimated from characters: %s", why)


def _flat(message: object) -> Mapping[str, Any]:
    """Return a message whose content is text, as chat templates need it."""
    if not isinstance(message, Mapping):
        raise CannotRender("a message that is not a mapping")
    fields = dict(cast("Mapping[str, Any]", message))
    content = fields.get("content")
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):  # pyright: ignore[reportUnknownMemberType]
            raise CannotRender("content that is not text")
        fields["content"] = "\n".join(part["text"] for part in parts)
    return fields


def _token(declared: object) -> str:
    """Return a special token of a configuration, in which it is a string, or a mapping with its content."""
    if isinstance(declared, Mapping):
        declared = cast("Mapping[str, object]", declared).get("content")
    return declared if isinstance(declared, str) else ""


def _config_of(directory: Path) -> Mapping[str, Any]:
    """Return the tokenizer's configuration; an empty one if the checkpoint has none."""
    file = directory / "tokenizer_config.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any]) if file.is_file() else {}
    except (OSError, *UNREADABLE) as error:
        raise BadRequest(f"render-model: {file} cannot be read: {error}", "render-model") from error


def _template_of(directory: Path, config: Mapping[str, Any]) -> jinja2.Template | None:
    """Return the checkpoint's chat template, in the environment that such templates expect; None without one."""
    file = directory / "chat_template.jinja"
    try:
        source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"render-model: {file} cannot be read: {error}", "render-model") from error
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
