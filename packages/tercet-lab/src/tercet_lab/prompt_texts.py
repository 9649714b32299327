"""Tokenization and chat templates by the files of a checkpoint, without weights and without transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import msgspec
from tokenizers import Tokenizer

from tercet.protocol import BadRequest
from tercet.protocol.json_text import UNREADABLE


class TextPart(msgspec.Struct, frozen=True):
    """A part of a message's content; only text parts are supported."""

    type: str
    text: str = ""


class ChatMessage(msgspec.Struct, frozen=True):
    """A message of a chat."""

    role: str
    content: str | list[TextPart] | None = None

    def to_template(self) -> dict[str, str]:
        """Return the message for chat templates; raise :class:`~tercet.protocol.BadRequest` for a part without text."""
        if not isinstance(self.content, list):
            return {"role": self.role, "content": self.content or ""}
        for part in self.content:
            if part.type != "text":
                raise BadRequest(f"messages: a part has the type {part.type!r}; only text is supported", "messages")
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class PromptTexts:
    """The tokenizer and the chat template of ``checkpoint``.

    The constructor raises :class:`~tercet.protocol.BadRequest` without a valid tokenizer.
    """

    def __init__(self, checkpoint: Path) -> None:
        file = checkpoint / "tokenizer.json"
        if not file.is_file():
            raise BadRequest(f"model: {checkpoint} has no tokenizer.json, which a simulated fleet needs", "model")
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no other class
            raise BadRequest(f"model: {file} is not a tokenizer: {error}", "model") from error
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            self._template = environment.from_string(_template_in(checkpoint))
        except (OSError, jinja2.TemplateError, *UNREADABLE) as error:
            raise BadRequest(f"model: the chat template of {checkpoint} cannot be read: {error}", "model") from error

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        # For a batch, the library releases the interpreter's lock; for one text it does not.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; tokens outside the vocabulary are left out."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def chat(self, messages: Sequence[ChatMessage]) -> str:
        """Return the prompt for the next answer of a chat.

        Raises :class:`~tercet.protocol.BadRequest` without messages, and if the chat template refuses them.
        """
        if not messages:
            raise BadRequest("messages: is empty; send at least one message", "messages")
        try:
            return self._template.render(
                messages=[each.to_template() for each in messages], add_generation_prompt=True
            )  # fmt: skip
        except jinja2.TemplateError as error:
            raise BadRequest(f"messages: the chat template refuses them: {error}", "messages") from error


# The template for a model without one: roles as words.
PLAIN_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


def _template_in(checkpoint: Path) -> str:
    own = checkpoint / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    file = checkpoint / "tokenizer_config.json"
    config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any]) if file.is_file() else {}
    template = config.get("chat_template")
    return template if isinstance(template, str) else PLAIN_TEMPLATE
