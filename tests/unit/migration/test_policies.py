"""What each policy proposes, in tables; and that no balancing makes a fleet less balanced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.migration import LoadedEngine, Selection, SequenceView, Wanted, balance, drain, prefill_to_decode
from tercet.migration.selection import Measure, Order

ALL = Selection("SR", "num_req", 100)


def sequence(name: str, tokens: int = 100, running: bool = True, age: float = 1.0, share: float = 0.1) -> SequenceView:
    return SequenceView(name, tokens, share, running, age)


# ---- which sequences ---------------------------------------------------------------------------------------------

SEQUENCES = (
    sequence("a", tokens=300, age=1, share=0.3),
    sequence("b", tokens=100, age=3, share=0.1),
    sequence("c", tokens=200, age=2, share=0.2),
    sequence("x", tokens=50, age=5, running=False, share=0.05),
    sequence("y", tokens=60, age=9, running=False, share=0.06),
)


@pytest.mark.parametrize(
    ("order", "chosen"),
    [("SR", "bca"), ("LR", "acb"), ("FCR", "bca"), ("LCR", "acb"), ("FCW", "yx"), ("FCWSR", "yxbca")],
)
def test_orders(order: Order, chosen: str) -> None:
    assert "".join(each.seq_id for each in Selection(order, "num_req", 100).of(SEQUENCES)) == chosen


@pytest.mark.parametrize(
    ("measure", "value", "chosen"),
    [
        ("num_req", 1, "b"),
        ("num_req", 2, "bc"),
        ("num_tokens", 300, "bc"),
        ("num_tokens", 99, ""),
        ("block_ratio", 0.31, "bc"),
        ("block_ratio", 0.1, "b"),
    ],
)
def test_how_many(measure: Measure, value: float, chosen: str) -> None:
    assert "".join(each.seq_id for each in Selection("SR", measure, value).of(SEQUENCES)) == chosen


def test_what_does_not_fit_is_passed_over() -> None:
    assert [each.seq_id for each in Selection("LR", "num_tokens", 250).of(SEQUENCES)] == ["c"]
    assert [each.seq_id for each in Selection("FCWSR", "num_tokens", 220).of(SEQUENCES)] == ["y", "x", "b"]


# ---- where to ----------------------------------------------------------------------------------------------------


def engine(
    name: str, role: Any, load: float | None, sequences: Sequence[SequenceView] = (), **state: bool
) -> LoadedEngine:
    return LoadedEngine(name, role, load, sequences, **state)


def moves(wanted: Any) -> list[tuple[str, str, str]]:
    return [(each.seq_id, each.source, each.destination) for each in wanted]


def test_a_drained_engine_is_emptied_over_the_least_loaded_that_decode() -> None:
    found = drain(
        [
            engine("gone", "decode", 0.4, [sequence("a"), sequence("b", running=False), sequence("c")], draining=True),
            engine("p", "prefill", 0.0),
            engine("d", "decode", 0.3),
            engine("e", "both", 0.15),
        ]
    )
    assert moves(found) == [("a", "gone", "e"), ("b", "gone", "e"), ("c", "gone", "d")]


@pytest.mark.parametrize(
    ("others", "destination"),
    [
        ([engine("p", "prefill", 0.5)], "p"),
        ([engine("d", "decode", 0.5, reachable=False), engine("p", "prefill", 0.5)], "p"),
        ([engine("d", "decode", 0.5, draining=True)], None),
        ([], None),
    ],
)
def test_without_an_engine_that_decodes_any_other_will_do(others: list[LoadedEngine], destination: str | None) -> None:
    found = moves(drain([engine("gone", "decode", 0.4, [sequence("a")], draining=True), *others]))
    assert found == ([("a", "gone", destination)] if destination else [])


def test_after_its_first_token_a_sequence_leaves_the_prefill_engine() -> None:
    found = prefill_to_decode(
        [
            engine("p", "prefill", 0.4, [sequence("a"), sequence("waits", running=False), sequence("b")]),
            engine("q", "prefill", 0.1, [sequence("c")]),
            engine("d", "decode", 0.05, [sequence("stays")]),
            engine("e", "decode", 0.0),
        ]
    )
    assert moves(found) == [("a", "p", "e"), ("b", "p", "d"), ("c", "q", "e")]


def test_without_a_decode_engine_sequences_stay_where_they_were_prefilled() -> None:
    assert moves(prefill_to_decode([engine("p", "prefill", 0.4, [sequence("a")]), engine("q", "prefill", 0.0)])) == []


@pytest.mark.parametrize(
    ("loads", "threshold", "expected"),
    [
        ((0.9, 0.1), 0.2, ["a", "b", "c"]),  # 0.8, 0.6, 0.4: then 0.2, which is not more than the threshold
        ((0.5, 0.4), 0.2, []),
        ((0.5, 0.2), 0.2, ["a"]),
        ((0.15, 0.0), 0.1, ["a"]),
        ((0.1, 0.0), 0.0, []),  # the two would only change places
        ((0.1, 0.1), 0.0, []),
    ],
)
def test_loads_are_balanced_until_they_are_close(
    loads: tuple[float, float], threshold: float, expected: list[str]
) -> None:
    high = engine("high", "decode", loads[0], [sequence(name, tokens=100 + at) for at, name in enumerate("abcdef")])
    found = balance([high, engine("low", "decode", loads[1])], ["decode"], threshold, ALL, "decode_load")
    assert moves(found) == [(name, "high", "low") for name in expected]


def test_only_engines_of_the_role_that_have_reported_and_answer_are_balanced() -> None:
    high = engine("high", "decode", 0.9, [sequence("a")])
    others = [
        engine("silent", "decode", None),
        engine("other", "prefill", 0.0),
        engine("drained", "decode", 0.0, draining=True),
        engine("gone", "decode", 0.0, reachable=False),
    ]
    assert moves(balance([high, *others], ["decode"], 0.1, ALL, "decode_load")) == []
    found = list(balance([high, *others, engine("low", "decode", 0.3)], ["decode"], 0.1, ALL, "decode_load"))
    assert found == [Wanted("a", "high", "low", "decode_load")]


def test_what_is_on_its_way_counts() -> None:
    low = engine("low", "decode", 0.1)
    low.arriving = 0.7
    assert moves(balance([engine("high", "decode", 0.9, [sequence("a")]), low], ["decode"], 0.2, ALL, "x")) == []


@given(
    st.lists(st.tuples(st.floats(0, 1), st.lists(st.floats(0.001, 0.5), max_size=6)), min_size=2, max_size=6),
    st.floats(0, 0.5),
)
def test_balancing_never_widens_the_gap(fleet: list[tuple[float, list[float]]], threshold: float) -> None:
    engines = [
        engine(f"e{at}", "decode", load, [sequence(f"{at}.{n}", share=share) for n, share in enumerate(shares)])
        for at, (load, shares) in enumerate(fleet)
    ]

    def gap() -> float:
        return max(each.believed for each in engines) - min(each.believed for each in engines)

    before = gap()
    for _ in balance(engines, ["decode"], threshold, ALL, "x"):
        assert gap() <= before + 1e-9
