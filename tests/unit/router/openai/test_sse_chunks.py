"""Chunks against those that vLLM's own classes make of the same values; log probabilities on their way to a client keep
their tokens, values and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.completion.protocol import CompletionResponseStreamChoice, CompletionStreamResponse
from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo, UsageInfo
from vllm.logprobs import append_logprobs_for_next_position
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer
from vllm.v1.outputs import LogprobsLists

from tercet.protocol import BadRequest, Output, TokenLogprob
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
from tercet.router.openai.fast_path.token_texts import TokenTexts, look_up, texts_of
from tercet.router.openai.program_client import to_core_output, to_request
from tercet.vllm_plugin.differences import CHUNKS_WITHOUT_TRANSFER
from tercet.vllm_plugin.edge.llm_requests import reasoning_of, to_vllm

from .vocabulary import SPECIAL, tokenizer

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


VOCABULARY = 40


def as_an_engine_says_it(sampled_rank: int, num_logprobs: int) -> tuple[TokenLogprob, ...]:
    """The sampled token and the top ones, each once; the token of rank r is called 1000 + r."""
    ranks = dict.fromkeys([sampled_rank, *range(1, num_logprobs + 1)])
    return tuple(TokenLogprob(1000 + rank, -float(rank), rank) for rank in ranks)


def as_vllm_reads_it(found: LogprobsLists, row: int, num_logprobs: int) -> dict[int, tuple[float, int | None]]:
    read: list[dict[int, object]] = []
    token_ids = found.logprob_token_ids[row].tolist()
    append_logprobs_for_next_position(
        read,  # type: ignore[arg-type]
        token_ids, found.logprobs[row].tolist(), ["?"] * len(token_ids), int(found.sampled_token_ranks[row]),
        num_logprobs,
    )  # fmt: skip
    return {token: (item.logprob, item.rank) for token, item in read[0].items()}  # type: ignore[attr-defined]


@given(st.lists(st.integers(1, VOCABULARY), min_size=1, max_size=6), st.integers(0, 8))
def test_logprobs(sampled_ranks: list[int], num_logprobs: int) -> None:
    positions = tuple(as_an_engine_says_it(rank, num_logprobs) for rank in sampled_ranks)
    output = to_core_output("s", 1, Output(tuple(p[0].token_id for p in positions), logprobs=positions), None)
    assert output.new_logprobs is not None
    for row, position in enumerate(positions):
        expected = {found.token_id: (found.logprob, found.rank) for found in position}
        read = as_vllm_reads_it(output.new_logprobs, row, num_logprobs)
        assert read == expected
        assert next(iter(read)) == position[0].token_id


@pytest.mark.parametrize("num_logprobs", [0, 1, 5])
def test_prompt_logprobs_have_none_for_the_first_token(num_logprobs: int) -> None:
    positions = (None, *(as_an_engine_says_it(rank, num_logprobs) for rank in (1, 3, 30)))
    tensors = to_core_output("s", 4, Output((7,), prompt_logprobs=positions), None).new_prompt_logprobs_tensors
    assert tensors is not None
    lists = LogprobsLists(
        tensors.logprob_token_ids.numpy(), tensors.logprobs.numpy(), tensors.selected_token_ranks.numpy()
    )
    for row, position in enumerate(positions[1:]):
        assert position is not None
        expected = {found.token_id: (found.logprob, found.rank) for found in position}
        assert as_vllm_reads_it(lists, row, num_logprobs) == expected


# ---- where the structure of the output starts ----------------------------------------------------------------------


def asked(params: SamplingParams) -> EngineCoreRequest:
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    return EngineCoreRequest(
        request_id="r", prompt_token_ids=[1], mm_features=None, sampling_params=params, pooling_params=None,
        arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None, reasoning_ended=False,
        reasoning_parser_kwargs=kwargs,
    )  # fmt: skip


def test_engines_hear_of_the_reasoning_before_a_structure() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="x"))
    told = to_request(asked(params), {}).sampling_params
    said = {"reasoning_ended": False, "reasoning_parser_kwargs": {"chat_template_kwargs": {"enable_thinking": False}}}
    assert reasoning_of(told) == said
    assert to_vllm(told, {}, 0).structured_outputs is not None


def test_without_a_structure_nothing_is_said_of_the_reasoning() -> None:
    assert reasoning_of(to_request(asked(SamplingParams()), {}).sampling_params) == {}


def test_nonsense_about_the_reasoning_is_refused() -> None:
    with pytest.raises(BadRequest, match="reasoning_ended"):
        reasoning_of({"reasoning_ended": "perhaps"})


# Looked up or decoded: the same text for each token.

TOKENIZER = tokenizer()
WORDS = len(TOKENIZER)
PIECES = cast(TokenTexts, texts_of(TOKENIZER))
WHALE = "\U0001f40b"  # in none of the texts that the vocabulary was made from
TOKENS = st.lists(st.integers(0, WORDS - 1), max_size=12)


def detokenizer(prompt: Sequence[int], **options: Any) -> FastIncrementalDetokenizer:
    wanted = {
        "stop": [],
        "min_tokens": 0,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        **options,
    }
    request = SimpleNamespace(request_id="r", prompt_token_ids=list(prompt), sampling_params=SimpleNamespace(**wanted))
    return FastIncrementalDetokenizer(TOKENIZER, cast(Any, request))


def tokens_of_text(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@given(prompt=TOKENS, answer=TOKENS, skip=st.booleans())
def test_any_tokens_have_the_same_text(prompt: list[int], answer: list[int], skip: bool) -> None:
    plain, quick = (detokenizer(prompt, skip_special_tokens=skip) for _ in range(2))
    decode = look_up(quick, PIECES, prompt)
    assert decode is not None
    assert [decode(token) for token in answer] == [plain.decode_next(token) for token in answer]


@given(text=st.text(max_size=30), end=st.integers(0, 30))
def test_a_text_that_is_cut_anywhere_goes_on(text: str, end: int) -> None:
    """Prompts may end in the middle of a character."""
    tokens = tokens_of_text(text)
    prompt, answer = tokens[:end], tokens[end:]
    plain, quick = detokenizer(prompt), detokenizer(prompt)
    look_up(quick, PIECES, prompt)
    for token in answer:
        assert quick.update([token], False) == plain.update([token], False)
        assert quick.get_next_output_text(False, True) == plain.get_next_output_text(False, True)


def test_whole_characters_never_reach_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    found = detokenizer(tokens_of_text("the"))
    monkeypatch.setattr(found, "_protected_step", lambda _: pytest.fail("it was decoded"))
    decode = look_up(found, PIECES, tokens_of_text("the"))
    assert decode is not None
    assert "".join(map(decode, tokens_of_text(" quick brown fox"))) == " quick brown fox"


def test_pieces_are_whole_or_empty() -> None:
    parts = tokens_of_text(WHALE)
    assert [PIECES[token] for token in tokens_of_text("caf\u00e9")] == [
        TOKENIZER.decode([token]) for token in tokens_of_text("caf\u00e9")
    ]
    assert len(parts) > 1
    assert [PIECES[token] for token in parts] == [""] * len(parts)
    lone = TOKENIZER.convert_tokens_to_ids("\u00f0")  # the byte 0xF0, with which a character of four begins
    assert [PIECES[lone], PIECES[TOKENIZER.convert_tokens_to_ids(SPECIAL)]] == ["", ""]
    assert [PIECES[WORDS + 7], PIECES[2**40], PIECES[-1]] == ["", "", ""]


def test_where_text_depends_on_neighbours_nothing_is_looked_up() -> None:
    assert texts_of(tokenizer(decoders.Metaspace())) is None
    assert texts_of(None) is None
    assert texts_of(object()) is None
    assert look_up(detokenizer([]), None, []) is None
    assert look_up(IncrementalDetokenizer(), PIECES, []) is None
    specials = detokenizer([], skip_special_tokens=False, spaces_between_special_tokens=False)
    assert look_up(specials, PIECES, []) is None
