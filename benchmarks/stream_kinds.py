"""Kinds of streams for `front_door.py`: what their clients ask for, and what the model says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# vLLM's parsers, of the router and of its API server.
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
    """A kind of stream: ``more`` is what clients ask for beside the prompt, ``says`` the model's text if it matters."""

    path: str = COMPLETIONS
    more: dict[str, Any] = field(default_factory=dict[str, Any])
    says: str = ""

    def body(self, prompt: str) -> dict[str, Any]:
        """What differs between the requests of this kind and others; a request's seed tells the model what to say."""
        said = {"seed": seed_of(self)} if self.says else {}
        if self.path == COMPLETIONS:
            return {"prompt": prompt, **said, **self.more}
        return {"messages": [{"role": "user", "content": prompt}], **said, **self.more}


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
}


def seed_of(kind: StreamKind) -> int:
    """The seed of a kind's requests."""
    return 1 + list(KINDS.values()).index(kind)


def scripts_of(kinds: Sequence[str], model: str) -> str:
    """The tokens for each kind's seed, in the words of ``token_source.py``."""
    said = {kind: KINDS[kind] for kind in kinds if KINDS[kind].says}
    if not said:
        return "{}"
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    return json.dumps(
        {seed_of(kind): tokenizer.encode(kind.says, add_special_tokens=False) for kind in said.values()}
    )  # fmt: skip
