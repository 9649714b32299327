"""Answers of OpenAI's completions and chat: chunks, usage at the end, ``[DONE]``.

Relies on serving objects making the events of errors with ``create_streaming_error_response`` and
``_convert_generation_error_to_streaming_response``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.exceptions import GenerationError
from vllm.outputs import RequestOutput

from tercet.vllm_plugin.fast_path.answer_events import Told
from tercet.vllm_plugin.fast_path.sse_chunks import DONE, ChoiceChunks, ChunkWriter, usage_of
from tercet.vllm_plugin.frontend.program_client import SequenceFailed
from tercet.wire.serving.answers import with_named_code


@dataclass
class ChunkAnswer:
    """One answer, which vLLM's object ``serving`` prepared.

    ``role`` is the role of a chat answer, None for a completion. ``usage``: the client asked for usage at the end;
    ``usage_each``: in each chunk. ``prompt_ids`` and ``prompt_text``: the first chunk has the prompt's tokens, its
    text.
    """

    serving: Any
    chunks: ChunkWriter
    role: str | None
    n: int
    usage: bool
    usage_each: bool
    prompt_ids: bool
    prompt_text: bool = False
    multimodal_tokens: Mapping[str, int] | None = None
    keeps_alive: bool = True
    _first: RequestOutput | None = None

    def choice(self, index: int) -> ChoiceChunks:
        """Return the chunks of the choice with this index."""
        return self.chunks.choice(index)

    def begin(self) -> bytes:
        """Return nothing: OpenAI's formats have no event before the first output."""
        return b""

    def result(self, result: RequestOutput) -> bytes:
        """Return the chunks with the role of each choice of a chat answer, at the first result of any choice."""
        if self._first is not None:
            return b""
        self._first = result
        if self.role is None:
            return b""
        prompt = result.prompt_token_ids if self.prompt_ids else None
        text = result.prompt if self.prompt_text else None
        usage = b""
        if self.usage_each:
            reasoning = 0 if counts_reasoning(self.serving) else None
            usage = usage_of(len(result.prompt_token_ids or ()), 0, reasoning, is_chat=True)
        return b"".join(self.chunks.role(self.role, index, prompt, text, usage) for index in range(self.n))

    async def end(self, choices: Sequence[Told]) -> bytes:
        """Return the usage chunk, if the client asked for it, and ``[DONE]``."""
        first = self._first
        if not self.usage or first is None:
            return DONE
        counts = counts_of(self.serving, first, choices, self.role is not None, self.multimodal_tokens)
        return self.chunks.usage(counts, self.serving.system_fingerprint) + DONE

    def failed(self, error: Exception) -> bytes:
        """Return the event of the error, and ``[DONE]``."""
        if isinstance(error, SequenceFailed):
            said = msgspec.json.encode(error.error.to_wire())
        else:
            said = with_named_code(error_of(self.serving, error))
        return b"data: %b\n\n%b" % (said, DONE)


def error_of(serving: Any, error: Exception) -> bytes:
    """Return the JSON of an error of vLLM's layer for a stream of chunks."""
    if isinstance(error, GenerationError):
        return serving._convert_generation_error_to_streaming_response(error).encode()
    return serving.create_streaming_error_response(error).encode()


def counts_reasoning(serving: Any) -> bool:
    """True if a chat answer's usage has the number of reasoning tokens."""
    return bool(serving._include_reasoning_tokens_details)


def counts_of(
    serving: Any, first: RequestOutput, choices: Sequence[Told], is_chat: bool, multimodal: Mapping[str, int] | None
) -> dict[str, Any]:
    """Return the usage at the end; ``first`` is the first result of any choice."""
    prompt, completion = len(first.prompt_token_ids or ()), sum(choice.num_tokens for choice in choices)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion
    }  # fmt: skip
    if serving.enable_prompt_tokens_details:
        counts["prompt_tokens_details"] = _prompt_details(first, is_chat, multimodal)
    if is_chat and counts_reasoning(serving):
        counts["completion_tokens_details"] = {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)}
    return counts


def _prompt_details(first: RequestOutput, is_chat: bool, multimodal: Mapping[str, int] | None) -> dict[str, Any] | None:
    """Return vLLM's details of the prompt's tokens; a completion has the number of cached tokens only."""
    counts: dict[str, Any] = {"cached_tokens": first.num_cached_tokens}
    if is_chat:
        counts["created_cache_tokens"] = first.num_cache_creation_tokens
        counts["multimodal_tokens"] = multimodal or None
    return {name: count for name, count in counts.items() if count is not None} or None
