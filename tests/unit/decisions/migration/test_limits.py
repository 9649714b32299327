"""Which limit holds a move back, in tables; and that no sequence of beginnings and ends exceeds any."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.decisions.migration import CountedMove, MovesUnderWay
from tercet.protocol import NoSpace
from tercet.settings import MoveSettings


def moving(source: str, destination: str, tokens: int = 100, share: float = 0.1) -> CountedMove:
    return CountedMove(source, destination, tokens, share)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, None),
        ({"per_engine": 1}, "1 sequences move to y, and at most 1 may"),
        ({"at_once": 2}, "2 sequences move already, and at most 2 may"),
        ({"tokens": 299}, "200 tokens move already; with 100 more they exceed 299"),
        ({"tokens": 300}, None),
        ({"tokens_per_engine": 199}, "100 tokens move to y; with 100 more they exceed 199"),
        ({"tokens_per_engine": 200}, None),
        ({"kv_usage": 0.25}, "20.0% of a KV cache move already; with 10.0% more they exceed 25.0%"),
        ({"kv_usage": 0.35}, None),
        ({"kv_usage_per_engine": 0.15}, "10.0% of a KV cache move to y; with 10.0% more they exceed 15.0%"),
        ({"kv_usage_per_engine": 0.25}, None),
    ],
)
def test_limits(settings: dict[str, Any], said: str | None) -> None:
    moves = MovesUnderWay(MoveSettings(**settings))
    with moves.counted(moving("a", "y")), moves.counted(moving("b", "z")):
        assert moves.refusal(moving("c", "y")) == said
        away = moves.refusal(moving("a", "x"))
        assert away == (said and said.replace("to y", "away from a"))


def test_one_alone_may_have_more_than_a_limit() -> None:
    moves = MovesUnderWay(MoveSettings(tokens=10, tokens_per_engine=10, kv_usage=0.01, kv_usage_per_engine=0.01))
    assert moves.refusal(moving("a", "b")) is None


def test_a_full_engine_takes_nothing() -> None:
    moves = MovesUnderWay(MoveSettings(ceiling=0.9))
    assert moves.refusal(CountedMove("a", "b", 1, 0.1, usage=0.89)) is None
    assert moves.refusal(CountedMove("a", "b", 1, 0.1, usage=0.9)) == "b uses 90% of its KV cache"


@dataclass
class Board:
    """Where processes announce what they move."""

    said: dict[int, Sequence[CountedMove]] = field(default_factory=dict[int, Sequence[CountedMove]])


@dataclass
class Process:
    board: Board
    number: int

    def announce(self, moves: Sequence[CountedMove]) -> None:
        self.board.said[self.number] = list(moves)

    def announced(self) -> Sequence[CountedMove]:
        return [move for number, said in self.board.said.items() if number != self.number for move in said]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.sampled_from("abc"), st.sampled_from("abc")), max_size=40)
)
def test_no_order_of_events_exceeds_the_limits_of_several_processes(events: list[tuple[int, bool, str, str]]) -> None:
    board, limits = Board(), MoveSettings(at_once=3, per_engine=2)
    processes = [MovesUnderWay(limits, Process(board, number)) for number in range(3)]
    open_moves: list[list[ExitStack]] = [[], [], []]
    for number, begins, source, destination in events:
        if begins:
            with ExitStack() as stack, suppress(NoSpace):
                stack.enter_context(processes[number].counted(moving(source, destination)))
                open_moves[number].append(stack.pop_all())
        elif open_moves[number]:
            open_moves[number].pop().close()
        everywhere = processes[0].everywhere()
        assert len(everywhere) == sum(map(len, open_moves)) <= 3
        assert all(sum(move.destination == name for move in everywhere) <= 2 for name in "abc")
        assert all(sum(move.source == name for move in everywhere) <= 2 for name in "abc")
    for each in open_moves:
        for stack in each:
            stack.close()
    assert processes[0].everywhere() == []
