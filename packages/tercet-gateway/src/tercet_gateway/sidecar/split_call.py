"""A request that may be split: the reasons why it cannot be, its prefill request, and its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from tercet.protocol import BadRequest
from tercet.protocol.headers import CHAT, COMPLETIONS, RESPONSES

SPLIT_PATHS = frozenset({CHAT, COMPLETIONS, RESPONSES})
KV_PARAMS = "kv_transfer_params"
# The fields of a chat request that vLLM's /tokenize accepts: those of which the prompt is made.
OF_THE_PROMPT = (
    "model", "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "add_special_tokens",
)  # fmt: skip
# The fields that the prefill request, with its one unused token, must not have.
OF_THE_ANSWER = (
    "stream_options", "min_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "echo",
    "suffix", "n", "best_of", "stop", "stop_token_ids", "include", "store", "request_id",
)  # fmt: skip
LIMITS: Mapping[str, Mapping[str, Any]] = {
    COMPLETIONS: {"max_tokens": 1},
    CHAT: {"max_tokens": 1, "max_completion_tokens": 1},
    RESPONSES: {"max_output_tokens": 1, "store": False},
}
TEXTS = ("text", "input_text", "output_text")  # not a set: a client may send any type, lists too


@dataclass(frozen=True)
class SplitCall:
    """One OpenAI request that may be split: its ``body``, its ``fields``, and its client's headers for engines.

    ``request_id`` is its name in logs, which clients choose; ``seq_id`` is its unique id on engines.
    """

    path: str
    body: bytes
    fields: Mapping[str, Any]
    headers: Mapping[str, str]
    request_id: str
    seq_id: str

    def require_whole(self) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` for a request that only one engine as a whole can serve."""
        fields = self.fields
        prompt = fields.get("prompt")
        reasons = {
            "several prompts": isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt),
            "beam search": bool(fields.get("use_beam_search")),
            "log probabilities of the prompt": fields.get("prompt_logprobs") is not None,
            "echo": bool(fields.get("echo")),
            "prompt embeddings": fields.get("prompt_embeds") is not None,
            "a continuation of an answer that the engine keeps": fields.get("previous_response_id") is not None,
            "a response in the background": bool(fields.get("background")),
        }
        for what, holds in reasons.items():
            if holds:
                raise BadRequest(f"{what}: cannot be prefilled elsewhere")

    def text(self, name: str) -> str | None:
        """Return the text of the field ``name``; None without it.

        Raises :class:`~tercet.protocol.BadRequest` for another type: the engine explains it to its client.
        """
        found = self.fields.get(name)
        if found is None or isinstance(found, str):
            return found
        raise BadRequest(f"{name}: is not text, and cannot be prefilled elsewhere", name)

    def first_leg(self) -> bytes:
        """Return the body of the prefill request: the same request, for one token and without a stream."""
        fields = {name: value for name, value in self.fields.items() if name not in OF_THE_ANSWER}
        keep = {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
            "remote_host": None, "remote_port": None,
        }  # fmt: skip
        return msgspec.json.encode({**fields, **LIMITS[self.path], "stream": False, KV_PARAMS: keep})

    def to_tokenize(self) -> Mapping[str, Any]:
        """Return the body of the request to vLLM's ``/tokenize`` for the prompt's tokens.

        Raises :class:`~tercet.protocol.BadRequest` for a prompt that is more than text.
        """
        fields = self.fields
        if self.path == COMPLETIONS:
            return {name: fields[name] for name in ("model", "prompt", "add_special_tokens") if name in fields}
        if self.path == RESPONSES:
            fields = {"model": fields.get("model"), "messages": messages_of(fields)}
            if "chat_template_kwargs" in self.fields:
                fields["chat_template_kwargs"] = self.fields["chat_template_kwargs"]
        _require_text(fields.get("messages"))
        return {name: fields[name] for name in OF_THE_PROMPT if name in fields}


def messages_of(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages that vLLM makes from a request to ``/v1/responses``.

    Raises :class:`~tercet.protocol.BadRequest` unless the input consists of text messages only.
    """
    for name in ("tools", "reasoning", "prompt"):
        if fields.get(name):
            raise BadRequest(f"{name}: responses with it cannot be prefilled elsewhere", name)
    given: Any = fields.get("input")
    if not isinstance(given, (str, list)):
        raise BadRequest("input: must be a string or a list", "input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else cast("list[Any]", given)
    instructions = fields.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    return [*system, *(_message(item) for item in items)]


def _message(item: Any) -> dict[str, Any]:
    fields = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
    content = fields.get("content")
    if fields.get("type", "message") != "message" or "role" not in fields:
        raise BadRequest("input: items other than messages cannot be prefilled elsewhere", "input")
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        _require_text([{"content": parts}])
        if fields["role"] == "assistant":  # vLLM uses only the first part
            content = _text(parts[0]) if parts else ""
        else:
            content = [{"type": "text", "text": _text(part)} for part in parts]
    return {"role": fields["role"], "content": content}


def _text(part: Any) -> Any:
    return part.get("text") if isinstance(part, dict) else part  # pyright: ignore


def _require_text(messages: Any) -> None:
    for message in messages if isinstance(messages, list) else ():  # pyright: ignore[reportUnknownVariableType]
        content: Any = message.get("content") if isinstance(message, dict) else None  # pyright: ignore
        if isinstance(content, list) and any(_kind(part) not in TEXTS for part in content):  # pyright: ignore
            raise BadRequest("messages: content that is not text cannot be prefilled elsewhere", "messages")


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else "text"  # pyright: ignore
