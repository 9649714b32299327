"""Looked up or decoded: the same text for each token."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer

from tercet.router.openai.fast_path.logprob_chunks import TokenTexts, look_up, texts_of

from .vocabulary import SPECIAL, tokenizer

TOKENIZER = tokenizer()
VOCABULARY = len(TOKENIZER)
PIECES = cast(TokenTexts, texts_of(TOKENIZER))
WHALE = "\U0001f40b"  # in none of the texts that the vocabulary was made from
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=12)


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
    assert [PIECES[VOCABULARY + 7], PIECES[2**40], PIECES[-1]] == ["", "", ""]


def test_where_text_depends_on_neighbours_nothing_is_looked_up() -> None:
    assert texts_of(tokenizer(decoders.Metaspace())) is None
    assert texts_of(None) is None
    assert texts_of(object()) is None
    assert look_up(detokenizer([]), None, []) is None
    assert look_up(IncrementalDetokenizer(), PIECES, []) is None
    specials = detokenizer([], skip_special_tokens=False, spaces_between_special_tokens=False)
    assert look_up(specials, PIECES, []) is None
