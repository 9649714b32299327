"""Chunks against those that vLLM's own classes make of the same values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.completion.protocol import CompletionResponseStreamChoice, CompletionStreamResponse
from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo, UsageInfo

from tercet.router.openai.fast_path.sse_chunks import (
    CHAT_FORMAT,
    COMPLETION_FORMAT,
    ChunkFormat,
    ChunkWriter,
    Extras,
    encode,
    framed,
    installed,
    usage_of,
)
from tercet.vllm_plugin.differences import CHUNKS_WITHOUT_TRANSFER

TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(['"text":""', '\\"a\\"', "\n\n", "data: "])
REASON = st.sampled_from(["stop", "length", "abort"])
STOP = st.none() | st.integers(0, 2**31) | TEXT
FINGERPRINT = st.none() | TEXT
CHAT, COMPLETION = installed(CHAT_FORMAT), installed(COMPLETION_FORMAT)
# What generators set from vLLM 0.33 on; `make test-vllm` has the tests that say which generator sets what.
HAS_TRANSFER = not CHUNKS_WITHOUT_TRANSFER.is_here
TRANSFER: dict[str, Any] = {"kv_transfer_params": None} if HAS_TRANSFER else {}
WEIGHTS: dict[str, Any] = {"weight_versions": None} if HAS_TRANSFER else {}


def event(chunk: Any, **options: bool) -> bytes:
    return f"data: {chunk.model_dump_json(exclude_unset=True, **options)}\n\n".encode()


def completion(request_id: str, created: int, model: str, **choice: Any) -> CompletionStreamResponse:
    made = CompletionResponseStreamChoice(
        index=0, logprobs=None, prompt_token_ids=None, token_ids=None, **WEIGHTS, **choice
    )
    return CompletionStreamResponse(
        id=request_id, object="text_completion", created=created, model=model, choices=[made], **TRANSFER
    )


def chat(request_id: str, created: int, model: str, delta: DeltaMessage, **choice: Any) -> Any:
    more = WEIGHTS if choice.get("finish_reason") else {}
    made = ChatCompletionResponseStreamChoice(index=0, delta=delta, logprobs=None, **choice, **more)
    return ChatCompletionStreamResponse(
        id=request_id, object="chat.completion.chunk", created=created, model=model, choices=[made],
        **(TRANSFER if delta.role is None else {}),
    )  # fmt: skip


def last(
    form: ChunkFormat, model: str, text: str, reason: str, stop: int | str | None, fingerprint: str | None
) -> bytes:
    chunks = ChunkWriter(form, "c", 1, model).choice(0)
    return chunks.last(chunks.text_delta(text), reason, stop, fingerprint)


@given(request_id=TEXT, created=st.integers(0, 2**40), model=TEXT, text=TEXT)
def test_text(request_id: str, created: int, model: str, text: str) -> None:
    own = ChunkWriter(COMPLETION, request_id, created, model).choice(0).text(text)
    assert own == framed(event(completion(request_id, created, model, text=text, finish_reason=None, stop_reason=None)))
    own = ChunkWriter(CHAT, request_id, created, model).choice(0).text(text)
    delta = DeltaMessage(content=text)
    assert own == framed(event(chat(request_id, created, model, delta, finish_reason=None, token_ids=None)))


@given(model=TEXT, text=TEXT, reason=REASON, stop=STOP, fingerprint=FINGERPRINT)
def test_the_last_chunk(model: str, text: str, reason: str, stop: int | str | None, fingerprint: str | None) -> None:
    stock: Any = completion("c", 1, model, text=text, finish_reason=reason, stop_reason=stop)
    if fingerprint is not None:
        stock.system_fingerprint = fingerprint
    assert last(COMPLETION, model, text, reason, stop, fingerprint) == event(stock)
    delta = DeltaMessage(content=text)
    stock = chat("c", 1, model, delta, finish_reason=reason, stop_reason=stop, token_ids=None)
    if fingerprint is not None:
        stock.system_fingerprint = fingerprint
    assert last(CHAT, model, text, reason, stop, fingerprint) == event(stock)


@given(model=TEXT, role=TEXT)
def test_the_role(model: str, role: str) -> None:
    stock = chat("c", 1, model, DeltaMessage(role=role, content=""), finish_reason=None)
    stock.prompt_token_ids = stock.prompt_text = None
    assert ChunkWriter(CHAT, "c", 1, model).role(role) == event(stock)


@pytest.mark.parametrize("details", [None, {"cached_tokens": 3}, {"cached_tokens": 0, "created_cache_tokens": 7}])
@given(prompt=st.integers(0, 2**40), completion=st.integers(0, 2**40), fingerprint=FINGERPRINT)
def test_usage(details: dict[str, int] | None, prompt: int, completion: int, fingerprint: str | None) -> None:
    usage = UsageInfo(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
    if details is not None:
        usage.prompt_tokens_details = PromptTokenUsageInfo.model_validate(details)
    counts = {
        "prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion,
        "prompt_tokens_details": details,
    }  # fmt: skip
    shared: dict[str, Any] = {"id": "c", "created": 1, "model": "m", "choices": [], "usage": usage}
    stock: Any = CompletionStreamResponse(
        **shared, object="text_completion", system_fingerprint=fingerprint, metrics=None
    )  # fmt: skip
    own = ChunkWriter(COMPLETION, "c", 1, "m").usage(counts, fingerprint)
    assert own == event(stock, exclude_none=True)
    stock = ChatCompletionStreamResponse(
        **shared, object="chat.completion.chunk", system_fingerprint=fingerprint, metrics=None
    )
    own = ChunkWriter(CHAT, "c", 1, "m").usage(counts, fingerprint)
    assert own == event(stock, exclude_none=True)


@given(
    model=TEXT, text=TEXT, prompt=st.integers(0, 2**40), tokens=st.lists(st.integers(0, 2**31)), index=st.integers(0, 9)
)
def test_token_ids_and_counts(model: str, text: str, prompt: int, tokens: list[int], index: int) -> None:
    stock: Any = completion("c", 1, model, text=text, finish_reason=None, stop_reason=None)
    stock.choices[0].index, stock.choices[0].token_ids, stock.choices[0].prompt_token_ids = index, tokens, [prompt]
    stock.usage = UsageInfo(prompt_tokens=prompt, completion_tokens=2, total_tokens=prompt + 2)
    chunks = ChunkWriter(COMPLETION, "c", 1, model).choice(index)
    extras = Extras(b"null", encode(tokens), encode([prompt]), usage_of(prompt, 2, None, is_chat=False))
    assert chunks.event(chunks.text_delta(text), extras) == event(stock)
