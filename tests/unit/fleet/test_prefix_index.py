"""Prefix indexes, against plain sets that do the same slowly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tercet.fleet.prefix_index import Holders, RoutingHistory, StoredBlocks
from tercet.protocol import Request
from tercet.protocol.block_hashes import chain
from tercet.scheduling.hashing import block_hashes

ROWS = 40


def rows() -> int:
    return ROWS


def leading(held: set[int], hashes: list[int]) -> int:
    return next((depth for depth, block in enumerate(hashes) if block not in held), len(hashes))


@given(
    st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, 5), st.booleans()), max_size=300),
    st.lists(st.integers(0, 5), max_size=6),
)
def test_holders_are_those_with_all_first_blocks(steps: list[tuple[int, int, bool]], asked: list[int]) -> None:
    holders, plain = Holders(rows), [set[int]() for _ in range(ROWS)]
    for row, block, there in steps:
        if there:
            holders.add(row, block)
            plain[row].add(block)
        else:
            holders.discard(row, block)
            plain[row].discard(block)
    assert holders.matched(asked).tolist() == [leading(held, asked) for held in plain]
    assert len(holders) == len(set[int]().union(*plain))


def test_many_engines_that_stop_at_the_same_depth_are_all_found() -> None:
    holders = Holders(rows)
    for row in range(ROWS):
        holders.add(row, 1)
        if row % 4 == 0:
            holders.add(row, 2)
    assert holders.matched([1, 2, 3]).tolist() == [2 if row % 4 == 0 else 1 for row in range(ROWS)]


def test_history_drops_the_oldest_prompt_from_its_end() -> None:
    history = RoutingHistory(rows, capacity=4)
    history.note(3, [1, 2, 3])
    history.note(3, [7, 8])
    assert history.matched([1, 2, 3])[3] == 2
    assert history.matched([7, 8])[3] == 2
    history.note(3, [1, 2])  # used again: now the other one is older
    history.note(3, [9])
    assert history.matched([1, 2])[3] == 2
    assert history.matched([7, 8])[3] == 1


class PlainHistory:
    """The same, by looking at every block, in plain lists."""

    def __init__(self, capacity: int) -> None:
        self.recent = [list[int]() for _ in range(ROWS)]
        self._capacity = capacity

    def note(self, row: int, hashes: list[int]) -> None:
        others = [block for block in self.recent[row] if block not in hashes]
        self.recent[row] = [*others, *reversed(hashes)][-self._capacity :]

    def matched(self, hashes: list[int]) -> list[int]:
        return [leading(set(recent), hashes) for recent in self.recent]


turns = st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), max_size=12), st.booleans())


@given(st.lists(turns, max_size=60), st.integers(1, 20))
def test_history_is_as_a_plain_one(notes: list[tuple[int, list[int], bool]], capacity: int) -> None:
    history, plain = RoutingHistory(rows, capacity), PlainHistory(capacity)
    for row, tokens, forget in notes:
        hashes = chain(0, tuple(tokens), 1)
        if forget:
            history.forget(row)
            plain.recent[row] = []
        else:
            history.note(row, hashes)
            plain.note(row, hashes)
        assert history.matched(hashes).tolist() == plain.matched(hashes)
        assert len(history) == len(set[int]().union(*plain.recent))
    for row in range(4):
        history.forget(row)
    assert not len(history)


PROMPT = Request(seq_id="s", prompt=(1, 2, 3, 4, 5, 6))


def test_blocks_are_found_by_their_tokens_whatever_the_engine_calls_them() -> None:
    stored = StoredBlocks(rows, 2)
    stored.store(0, [b"x", b"y"], None, [1, 2, 3, 4])
    stored.store(1, [77], None, [1, 2])
    stored.store(1, [78], 77, [3, 4])
    stored.store(1, [79], 78, [5, 6])
    assert stored.matched(block_hashes(PROMPT, 2))[:2].tolist() == [2, 3]
    stored.remove(1, [77, "never announced"])
    assert stored.matched(block_hashes(PROMPT, 2))[:2].tolist() == [2, 0]
    stored.store(1, [77], None, [1, 2])
    assert stored.matched(block_hashes(PROMPT, 2))[1] == 3


def test_a_block_with_an_unknown_parent_is_left_out_and_counted() -> None:
    stored = StoredBlocks(rows, 2)
    stored.store(0, [2, 3], 1, [3, 4, 5, 6])
    assert stored.orphans == 2
    assert not stored.matched(block_hashes(PROMPT, 2)).any()


def test_a_block_held_under_two_names_is_there_until_both_are_gone() -> None:
    stored = StoredBlocks(rows, 2)
    stored.store(0, ["plain"], None, [1, 2])
    stored.store(0, ["plain"], None, [1, 2])  # said twice, held once
    stored.store(0, ["adapter"], None, [1, 2])
    stored.remove(0, ["plain"])
    assert stored.matched(block_hashes(PROMPT, 2))[0] == 1
    stored.remove(0, ["adapter"])
    assert stored.matched(block_hashes(PROMPT, 2))[0] == 0


def test_salted_blocks_are_found_by_salted_prompts_only() -> None:
    stored = StoredBlocks(rows, 2)
    stored.store(0, [1], None, [1, 2], salt="x")
    salted = Request(seq_id="s", prompt=PROMPT.prompt, cache_salt="x")
    assert stored.matched(block_hashes(salted, 2))[0] == 1
    assert stored.matched(block_hashes(PROMPT, 2))[0] == 0


def test_a_cleared_engine_has_nothing_and_can_begin_again() -> None:
    stored = StoredBlocks(rows, 2)
    stored.store(0, [1, 2], None, [1, 2, 3, 4])
    stored.forget(0)
    assert not stored.matched(block_hashes(PROMPT, 2)).any()
    stored.store(0, [1], None, [1, 2])
    assert stored.matched(block_hashes(PROMPT, 2))[0] == 1
