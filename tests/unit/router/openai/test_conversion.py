"""Log probabilities on their way from an engine to a client keep their tokens, values and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders
from vllm.logprobs import append_logprobs_for_next_position
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer
from vllm.v1.outputs import LogprobsLists

from tercet.protocol import BadRequest, Output, TokenLogprob
from tercet.router.openai.fast_path.token_texts import TokenTexts, look_up, texts_of
from tercet.router.openai.program_client import to_core_output, to_request
from tercet.vllm_plugin.edge.llm_requests import reasoning_of, to_vllm

from .vocabulary import SPECIAL, tokenizer

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


def encode(text: str) -> list[int]:
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
    tokens = encode(text)
    prompt, answer = tokens[:end], tokens[end:]
    plain, quick = detokenizer(prompt), detokenizer(prompt)
    look_up(quick, PIECES, prompt)
    for token in answer:
        assert quick.update([token], False) == plain.update([token], False)
        assert quick.get_next_output_text(False, True) == plain.get_next_output_text(False, True)


def test_whole_characters_never_reach_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    found = detokenizer(encode("the"))
    monkeypatch.setattr(found, "_protected_step", lambda _: pytest.fail("it was decoded"))
    decode = look_up(found, PIECES, encode("the"))
    assert decode is not None
    assert "".join(map(decode, encode(" quick brown fox"))) == " quick brown fox"


def test_pieces_are_whole_or_empty() -> None:
    parts = encode(WHALE)
    assert [PIECES[token] for token in encode("caf\u00e9")] == [
        TOKENIZER.decode([token]) for token in encode("caf\u00e9")
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
