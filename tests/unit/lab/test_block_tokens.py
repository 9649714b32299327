"""Tokens of a trace's blocks are equal to the tuple of them, whatever is asked, and made only then."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol.content import chain
from tercet_lab.bench.workloads.conversations import HashedWords
from tercet_lab.bench.workloads.recorded import block_text
from tercet_lab.block_tokens import BlockText, BlockTokens, begin_alike, part_of

WORDS = HashedWords(8)  # few words, so that an id has several digits, and different blocks are alike in places
TEXTS = {size: block_text(WORDS, "seed", size, 40) for size in (3, 4, 7, 16)}


@st.composite
def prompts(draw: st.DrawFn, size: int | None = None) -> tuple[BlockTokens, tuple[int, ...]]:
    """Tokens of blocks, and the same as a tuple."""
    text = TEXTS[draw(st.sampled_from(sorted(TEXTS))) if size is None else size]
    ids = tuple(draw(st.lists(st.integers(0, 40), min_size=1, max_size=6)))
    end = draw(st.integers(1, len(ids) * text.size))
    begin = draw(st.integers(0, end - 1))
    whole = tuple(itertools.chain.from_iterable(text.tokens(each, 0, text.size) for each in ids))
    return BlockTokens(text, ids, begin, end), whole[begin:end]


@given(prompts(), st.slices(100), st.integers(-100, 100))
def test_they_are_a_sequence(found: tuple[BlockTokens, tuple[int, ...]], some: slice, index: int) -> None:
    tokens, plain = found
    assert (len(tokens), tuple(tokens), hash(tokens), repr(tokens)) == (len(plain), plain, hash(plain), repr(plain))
    assert tokens == plain
    assert plain == tokens
    assert tokens[some] == plain[some]
    assert type(tokens[some]) is tuple
    assert (tokens + (1,), (1,) + tokens) == ((*plain, 1), (1, *plain))  # noqa: RUF005 - what programs write
    assert (*tokens, 1) == (*plain, 1)
    if -len(plain) <= index < len(plain):
        assert tokens[index] == plain[index]
    else:
        with pytest.raises(IndexError, match=str(index)):
            tokens[index]


@given(prompts(), st.data())
def test_parts_make_no_tokens_and_are_equal(found: tuple[BlockTokens, tuple[int, ...]], data: st.DataObject) -> None:
    tokens, plain = found
    end = data.draw(st.integers(1, len(plain)))
    begin = data.draw(st.integers(0, end - 1))
    for each in (tokens, plain):
        part = part_of(each, begin, end)
        assert type(part) is type(each)
        assert part == plain[begin:end]


@given(st.sampled_from(sorted(TEXTS)), st.data())
def test_beginnings_are_alike_if_their_tokens_are(size: int, data: st.DataObject) -> None:
    (one, plain), (other, plainly) = data.draw(prompts(size)), data.draw(prompts(size))
    count = data.draw(st.integers(1, min(len(plain), len(plainly))))
    expected = plain[:count] == plainly[:count]
    for this, that in itertools.product((one, plain), (other, plainly)):
        assert begin_alike(this, that, count) == expected
    assert begin_alike(one, BlockTokens(one._text, one._ids, one._begin, one._end), len(one))
    assert (one == other) == (plain == plainly)


@given(prompts(), st.integers(1, 20))
def test_the_hashes_of_its_blocks_are_those_of_tuples(found: tuple[BlockTokens, tuple[int, ...]], size: int) -> None:
    tokens, plain = found
    for _ in range(2):
        assert chain(7, tokens, size) == chain(7, plain, size)
    assert chain(7, tokens, size, 1, {0: (5,)}) == chain(7, plain, size, 1, {0: (5,)})


def test_different_ids_are_different_tokens() -> None:
    text: BlockText = TEXTS[4]
    assert len({text.tokens(each, 0, 4) for each in range(41)}) == 41
