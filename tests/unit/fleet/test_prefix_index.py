"""Prefix indexes, against plain sets that do the same slowly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tercet.fleet.prefix_index import Holders, RoutingHistory
from tercet.protocol.content import chain

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
