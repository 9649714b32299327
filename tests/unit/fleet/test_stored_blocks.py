"""What engines say they hold: names of theirs, copies, and blocks that come before their parents."""

from __future__ import annotations

import pytest

from tercet.decisions.scheduling.plugin import block_hashes
from tercet.fleet.prefix_index import StoredBlocks
from tercet.protocol import Request

PROMPT = Request(seq_id="s", prompt=(1, 2, 3, 4, 5, 6))


def rows() -> int:
    return 2


def found(stored: StoredBlocks) -> int:
    """How many blocks of the prompt the first engine holds."""
    return int(stored.matched(block_hashes(PROMPT, 2))[0])


@pytest.fixture
def stored() -> StoredBlocks:
    return StoredBlocks(rows, 2)


def test_blocks_are_found_by_their_tokens_whatever_the_engine_calls_them(stored: StoredBlocks) -> None:
    stored.store(0, [b"x", b"y"], None, [1, 2, 3, 4])
    stored.store(1, [77], None, [1, 2])
    stored.store(1, [78], 77, [3, 4])
    stored.store(1, [79], 78, [5, 6])
    assert stored.matched(block_hashes(PROMPT, 2))[:2].tolist() == [2, 3]
    stored.remove(1, [77, "never announced"])
    assert stored.matched(block_hashes(PROMPT, 2))[:2].tolist() == [2, 0]
    stored.store(1, [77], None, [1, 2])
    assert stored.matched(block_hashes(PROMPT, 2))[1] == 3


def test_a_block_with_an_unknown_parent_is_left_out_and_counted(stored: StoredBlocks) -> None:
    stored.store(0, [2, 3], 1, [3, 4, 5, 6])
    assert stored.orphans == 2
    assert not stored.matched(block_hashes(PROMPT, 2)).any()


def test_a_block_that_waits_for_its_parent_is_found_when_that_is_there(stored: StoredBlocks) -> None:
    stored.store(0, [3], 2, [5, 6])
    stored.store(0, [2], 1, [3, 4])
    assert (found(stored), stored.orphans) == (0, 2)
    stored.store(0, [1], None, [1, 2])
    assert (found(stored), stored.orphans) == (3, 0)


def test_a_block_keeps_its_place_while_its_parent_is_gone(stored: StoredBlocks) -> None:
    stored.store(0, [1, 2], None, [1, 2, 3, 4])
    stored.remove(0, [1])
    stored.store(0, [3], 2, [5, 6])
    assert found(stored) == 0
    stored.store(0, [1], None, [1, 2])
    assert found(stored) == 3


def test_a_block_that_is_gone_waits_no_more(stored: StoredBlocks) -> None:
    stored.store(0, [2, 3], 1, [3, 4, 5, 6])
    stored.remove(0, [3])
    stored.store(0, [1], None, [1, 2])
    assert (found(stored), stored.orphans) == (2, 0)
    stored.remove(0, [1, 2])
    assert not stored


def test_a_block_is_there_until_its_last_copy_is_gone(stored: StoredBlocks) -> None:
    for _ in range(3):
        stored.store(0, ["x", "y"], None, [1, 2, 3, 4])
    for _ in range(2):
        stored.remove(0, ["x", "y"])
        assert found(stored) == 2
    stored.remove(0, ["y"])
    assert found(stored) == 1
    stored.remove(0, ["x"])
    assert not stored


@pytest.mark.parametrize("tokens", [[], [1, 2], [1, 2, 3, 4, 5, 6]], ids=["none", "too few", "too many"])
def test_blocks_whose_tokens_are_not_known_count_as_copies_alone(stored: StoredBlocks, tokens: list[int]) -> None:
    stored.store(0, ["x", "y"], None, tokens)
    assert (found(stored), stored.orphans) == (0, 2)
    stored.store(0, ["x", "y"], None, [1, 2, 3, 4])
    stored.remove(0, ["x", "y"])
    assert (found(stored), stored.orphans) == (2, 0)
    stored.store(0, ["x"], None, tokens)
    stored.remove(0, ["x"])
    assert found(stored) == 2


def test_a_block_held_under_two_names_is_there_until_both_are_gone(stored: StoredBlocks) -> None:
    stored.store(0, ["plain"], None, [1, 2])
    stored.store(0, ["adapter"], None, [1, 2])
    stored.remove(0, ["plain"])
    assert stored.matched(block_hashes(PROMPT, 2))[0] == 1
    stored.remove(0, ["adapter"])
    assert stored.matched(block_hashes(PROMPT, 2))[0] == 0


def test_salted_blocks_are_found_by_salted_prompts_only(stored: StoredBlocks) -> None:
    stored.store(0, [1], None, [1, 2], salt="x")
    salted = Request(seq_id="s", prompt=PROMPT.prompt, cache_salt="x")
    assert stored.matched(block_hashes(salted, 2))[0] == 1
    assert stored.matched(block_hashes(PROMPT, 2))[0] == 0


def test_a_cleared_engine_has_nothing_and_can_begin_again(stored: StoredBlocks) -> None:
    stored.store(0, [1, 2], None, [1, 2, 3, 4])
    stored.forget(0)
    assert not stored.matched(block_hashes(PROMPT, 2)).any()
    stored.store(0, [1], None, [1, 2])
    assert stored.matched(block_hashes(PROMPT, 2))[0] == 1
