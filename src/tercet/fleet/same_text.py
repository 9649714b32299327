"""Checks that an engine has the tokenizer and the chat template of its router."""

from __future__ import annotations

from tercet.protocol import BadRequest, EngineStatus
from tercet.protocol.revision import TextFingerprint


def has_same_text(status: EngineStatus, text: TextFingerprint) -> bool:
    """True if an engine has this tokenizer and chat template; what either side does not report is not compared."""
    pairs = (status.text.tokenizer, text.tokenizer), (status.text.chat_template, text.chat_template)
    return all(theirs == ours or not theirs or not ours for theirs, ours in pairs)


def require_same_text(status: EngineStatus, text: TextFingerprint, param: str) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for an engine with another tokenizer or chat template."""
    if has_same_text(status, text):
        return
    if status.text.tokenizer and text.tokenizer and status.text.tokenizer != text.tokenizer:
        what, remedy = "tokenizer", "use the same --model and --tokenizer for the router as for its engines"
        theirs, ours = status.text.tokenizer, text.tokenizer
    else:
        what, remedy = (
            "chat template",
            "give the router the same checkpoint, or the right template by --chat-template",
        )
        theirs, ours = status.text.chat_template, text.chat_template
    raise BadRequest(
        f"{param}: the engine {status.engine} has another {what} (fingerprint {theirs}) than this router "
        f"({ours}), so its token ids have other meanings; {remedy}",
        param,
    )
