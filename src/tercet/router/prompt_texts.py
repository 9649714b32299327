"""Text to tokens and back, and chats as prompts, by the files of a checkpoint: no weights, no transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import msgspec
from tokenizers import Tokenizer

from tercet.protocol import BadRequest


class TextPart(msgspec.Struct, frozen=True):
    """A part of a message's content, of which text is taken alone."""

    type: str
    text: str = ""


class ChatMessage(msgspec.Struct, frozen=True):
    """A message of a chat."""

    role: str
    content: str | list[TextPart] | None = None

    def to_template(self) -> dict[str, str]:
        """The message as chat templates take it; raises :class:`~tercet.protocol.BadRequest` for what is not text."""
        if not isinstance(self.content, list):
            return {"role": self.role, "content": self.content or ""}
        for part in self.content:
            if part.type != "text":
                raise BadRequest(f"messages: a part of type {part.type!r} is not text", "messages")
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class PromptTexts:
    """The tokenizer and the chat template of ``checkpoint``; raises :class:`~tercet.protocol.BadRequest` without."""

    def __init__(self, checkpoint: Path) -> None:
        file = checkpoint / "tokenizer.json"
        if not file.is_file():
            raise BadRequest(f"model: {checkpoint} has no tokenizer.json, which a simulated fleet needs", "model")
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no other class
            raise BadRequest(f"model: {file} is not a tokenizer: {error}", "model") from error
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(_template_in(checkpoint))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; those that the vocabulary does not have are left out."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def chat(self, messages: Sequence[ChatMessage]) -> str:
        """A chat as a prompt for its next answer."""
        if not messages:
            raise BadRequest("messages: there is none", "messages")
        try:
            return self._template.render(
                messages=[each.to_template() for each in messages], add_generation_prompt=True
            )  # fmt: skip
        except jinja2.TemplateError as error:
            raise BadRequest(f"messages: the chat template refuses them: {error}", "messages") from error


# Of a model that brings no template: roles as words.
PLAIN_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


def _template_in(checkpoint: Path) -> str:
    own = checkpoint / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    file = checkpoint / "tokenizer_config.json"
    config: dict[str, Any] = msgspec.json.decode(file.read_bytes()) if file.is_file() else {}
    template = config.get("chat_template")
    return template if isinstance(template, str) else PLAIN_TEMPLATE
