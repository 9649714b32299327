"""Answers of OpenAI's completions and chat: chunks, a count at the end, ``[DONE]``.

Relies on serving objects making the events of errors by ``create_streaming_error_response`` and
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
from tercet.wire.serving.error_answers import with_named_code


@dataclass
class ChunkAnswer:
    """One answer: ``serving`` is vLLM's object that prepared it.

    ``role`` is that of a chat answer, None for a completion. ``usage`` tells whether the client asked for a count at
    the end, ``usage_each`` for one in each chunk; ``prompt_ids`` and ``prompt_text`` are for the first chunk.
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
        """Those of one choice."""
        return self.chunks.choice(index)

    def begin(self) -> bytes:
        """There are none."""
        return b""

    def result(self, result: RequestOutput) -> bytes:
        """With the first result of any choice, every chat answer tells its role."""
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
        """The count of all tokens, and the end."""
        first = self._first
        if not self.usage or first is None:
            return DONE
        counts = counts_of(self.serving, first, choices, self.role is not None, self.multimodal_tokens)
        return self.chunks.usage(counts, self.serving.system_fingerprint) + DONE

    def failed(self, error: Exception) -> bytes:
        """The error, and the end."""
        if isinstance(error, SequenceFailed):
            said = msgspec.json.encode(error.error.to_wire())
        else:
            said = with_named_code(error_of(self.serving, error))
        return b"data: %b\n\n%b" % (said, DONE)


def error_of(serving: Any, error: Exception) -> bytes:
    """An error of vLLM's layer, as a stream of chunks has it."""
    if isinstance(error, GenerationError):
        return serving._convert_generation_error_to_streaming_response(error).encode()
    return serving.create_streaming_error_response(error).encode()


def counts_reasoning(serving: Any) -> bool:
    """Whether a chat answer's usage tells how many tokens were reasoning."""
    return bool(serving._include_reasoning_tokens_details)


def counts_of(
    serving: Any, first: RequestOutput, choices: Sequence[Told], is_chat: bool, multimodal: Mapping[str, int] | None
) -> dict[str, Any]:
    """The usage at the end; ``first`` is the first result of any choice."""
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
    """vLLM's details of the prompt's tokens: completions tell of those found in the cache only."""
    counts: dict[str, Any] = {"cached_tokens": first.num_cached_tokens}
    if is_chat:
        counts["created_cache_tokens"] = first.num_cache_creation_tokens
        counts["multimodal_tokens"] = multimodal or None
    return {name: count for name, count in counts.items() if count is not None} or None
