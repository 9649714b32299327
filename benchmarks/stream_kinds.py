"""The kinds of streams for `front_door.py`: the requests of clients, and the texts of the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
# Flags for vLLM's parsers, for the router and for vLLM's API server.
PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
WORDS = "The weather there is fine, so that a walk along the river would be a good idea in the afternoon. " * 3
TOOL = {
    "type": "function",
    "function": {
        "name": "write_letter",
        "parameters": {"type": "object", "properties": {"to": {"type": "string"}, "text": {"type": "string"}}},
    },
}
CALL = json.dumps({"name": "write_letter", "arguments": {"to": "Anna", "text": WORDS}})


@dataclass(frozen=True)
class StreamKind:
    """A kind of stream. ``more`` has the fields of a request besides the prompt; ``says`` is the model's text.

    With an empty ``says``, the text is arbitrary.
    """

    path: str = COMPLETIONS
    more: dict[str, Any] = field(default_factory=dict[str, Any])
    says: str = ""

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        """Return the body of a request of this kind, without the model. A number in it selects the model's text."""
        said = {("top_k" if self.path == MESSAGES else "seed"): number_of(self)} if self.says else {}
        if self.path == MESSAGES:
            return {"max_tokens": tokens, "messages": [{"role": "user", "content": prompt}], **said, **self.more}
        if self.path == RESPONSES:
            return {"max_output_tokens": tokens, "ignore_eos": True, "input": prompt, **said, **self.more}
        common = {"max_tokens": tokens, "ignore_eos": True, **said, **self.more}
        if self.path == COMPLETIONS:
            return {"prompt": prompt, **common}
        return {"messages": [{"role": "user", "content": prompt}], **common}


KINDS = {
    "plain": StreamKind(),
    "chat": StreamKind(CHAT, says=f"<think>Well.</think>{WORDS}"),
    "tools": StreamKind(CHAT, {"tools": [TOOL]}, f"<think>Well.</think><tool_call>\n{CALL}\n</tool_call>"),
    "reasoning": StreamKind(CHAT, says=f"<think>{WORDS}{WORDS}"),
    "logprobs": StreamKind(more={"logprobs": 2}),
    "chat-logprobs": StreamKind(CHAT, {"logprobs": True, "top_logprobs": 2}, f"<think>Well.</think>{WORDS}"),
    "token-ids": StreamKind(more={"return_token_ids": True}),
    "usage": StreamKind(more={"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    "n2": StreamKind(more={"n": 2}),
    "responses": StreamKind(RESPONSES, says=f"<think>Well.</think>{WORDS}"),
    "messages": StreamKind(MESSAGES, says=f"<think>Well.</think>{WORDS}"),
}


def number_of(kind: StreamKind) -> int:
    """Return the number of a kind: the ``seed`` of its requests, or their ``top_k`` if they cannot have a seed."""
    return 1 + list(KINDS.values()).index(kind)


def scripts_of(kinds: Sequence[str], model: str) -> str:
    """Return the tokens for each kind's number, as JSON for ``token_source.py``."""
    said = {kind: KINDS[kind] for kind in kinds if KINDS[kind].says}
    if not said:
        return "{}"
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    return json.dumps(
        {number_of(kind): tokenizer.encode(kind.says, add_special_tokens=False) for kind in said.values()}
    )  # fmt: skip
