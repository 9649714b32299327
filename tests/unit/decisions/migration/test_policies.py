"""What each policy proposes, in tables; and that no balancing makes a fleet less balanced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.decisions.migration import (
    LoadedEngine,
    Rescheduling,
    Selection,
    SequenceView,
    Wanted,
    balance,
    consolidate,
    defragment,
    drain,
    failover,
    mitigate,
    policies_of,
    prefill_to_decode,
)
from tercet.decisions.migration.policies import BUILT_IN, Measure, Order
from tercet.protocol import BadRequest, Revision
from tercet.settings import RescheduleSettings

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


@pytest.mark.parametrize(("wanted", "chosen"), [(0.0, "bca"), (0.19, "cba"), (0.5, "acb")])
def test_what_fits_best_is_first(wanted: float, chosen: str) -> None:
    assert "".join(each.seq_id for each in Selection("FIT", "num_req", 100).of(SEQUENCES, wanted)) == chosen


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
    name: str, role: Any, load: float | None, sequences: Sequence[SequenceView] = (), **state: Any
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


def test_one_move_of_what_fits_closes_a_gap_that_the_shortest_would_hardly_narrow() -> None:
    running = [sequence("small", share=0.01), sequence("fits", share=0.3), sequence("large", share=0.5)]
    engines = [engine("high", "both", 0.9, running), engine("low", "both", 0.3)]
    assert moves(balance(engines, ["both"], 0.1, Selection(), "x")) == [("fits", "high", "low")]
    assert abs(engines[0].believed - engines[1].believed) < 0.01


def test_many_engines_are_balanced_at_once_in_pairs() -> None:
    loads = {"a": 0.9, "b": 0.8, "c": 0.5, "d": 0.45, "e": 0.2, "f": 0.1}
    engines = [engine(name, "both", load, [sequence(f"{name}1", share=0.2)]) for name, load in loads.items()]
    found = moves(balance(engines, ["both"], 0.2, Selection(), "x"))
    assert found == [("a1", "a", "f"), ("b1", "b", "e")]


def test_a_queue_is_demand_and_nothing_is_moved_to_where_it_has_no_room() -> None:
    queued = engine("queued", "both", 0.9, [sequence("runs", share=0.1), sequence("waits", running=False, share=0.3)])
    queued.waiting = 1
    full = engine("full", "both", 0.95, [sequence("f", share=0.1)])
    assert queued.demand == pytest.approx(1.2)
    assert moves(balance([queued, full], ["both"], 0.2, Selection(), "x")) == []  # there is no room for it
    roomy = engine("roomy", "both", 0.85)
    assert moves(balance([queued, roomy], ["both"], 0.2, Selection(), "x")) == [("runs", "queued", "roomy")]


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


# ---- engines that stand still ------------------------------------------------------------------------------------


def test_a_stale_engine_is_emptied_and_takes_nothing() -> None:
    stale = engine("stale", "decode", 0.4, [sequence("a"), sequence("b", running=False)], stale=True)
    gone = engine("gone", "decode", 0.4, [sequence("c")], draining=True)
    others = [engine("p", "prefill", 0.0), engine("d", "decode", 0.3)]
    assert moves(failover([stale, gone, *others])) == [("a", "stale", "d"), ("b", "stale", "d")]
    assert moves(drain([stale, gone, *others])) == [("c", "gone", "d")]


def test_what_waits_goes_on_waiting_at_an_engine_of_the_same_role() -> None:
    source = engine("p", "prefill", 0.4, [sequence("runs"), sequence("waits", running=False)], draining=True)
    others = [engine("q", "prefill", 0.5), engine("d", "decode", 0.1)]
    assert moves(drain([source, *others])) == [("runs", "p", "d"), ("waits", "p", "q")]


def test_while_all_stand_still_nothing_moves() -> None:
    engines = [engine(name, "both", 0.4, [sequence(name)], stale=True) for name in "ab"]
    assert moves(failover(engines)) == []


# ---- making room -------------------------------------------------------------------------------------------------


def shares(**named: float) -> list[SequenceView]:
    return [sequence(name, tokens=round(1000 * share), share=share) for name, share in named.items()]


@pytest.mark.parametrize(
    ("load", "others", "expected"),
    [
        (0.9, {"full": 0.75, "half": 0.5}, [("a", "half"), ("b", "half")]),  # a (0.1) fits below 0.8 at half only
        (0.9, {"full": 0.65, "half": 0.5}, [("a", "full"), ("b", "half")]),
        (0.8, {"half": 0.5}, []),
        (0.9, {"full": 0.8}, []),
    ],
)
def test_an_engine_above_the_ceiling_gives_sequences_to_the_fullest_below_it(
    load: float, others: dict[str, float], expected: list[tuple[str, str]]
) -> None:
    source = engine("high", "both", load, shares(a=0.1, b=0.11, c=0.12))
    found = mitigate([source, *(engine(name, "both", load) for name, load in others.items())], 0.8, ALL)
    until_below = expected[:1] if load - 0.1 <= 0.8 else expected
    assert moves(found) == [(name, "high", to) for name, to in until_below]


def test_a_stale_or_draining_engine_is_not_the_packers_affair() -> None:
    idle = engine("idle", "both", 0.1)
    for state in ({"stale": True}, {"draining": True}, {"reachable": False}):
        high = engine("high", "both", 0.9, shares(a=0.1), **state)
        assert moves(mitigate([high, idle], 0.8, ALL)) == []
        assert moves(consolidate([engine("low", "both", 0.1, shares(a=0.1), **state), idle], 0.8)) == []


def test_the_least_loaded_engine_is_emptied_if_all_of_it_fits_elsewhere() -> None:
    low = engine("low", "both", 0.3, shares(a=0.1, b=0.2))
    fleet = [low, engine("mid", "both", 0.45), engine("high", "both", 0.68), engine("empty", "both", 0.0)]
    assert moves(consolidate(fleet, 0.8)) == [("b", "low", "mid"), ("a", "low", "high")]
    assert low.believed == pytest.approx(0)


def test_an_engine_is_emptied_as_a_whole_or_not_at_all() -> None:
    low, high = engine("low", "both", 0.3, shares(a=0.1, b=0.2)), engine("high", "both", 0.65)
    assert moves(consolidate([low, high], 0.8)) == []
    assert (low.arriving, high.arriving) == (0, pytest.approx(0))


def test_packing_stays_within_what_engines_can_serve() -> None:
    low = engine("low", "decode", 0.1, shares(a=0.1))
    assert moves(consolidate([low, engine("p", "prefill", 0.5)], 0.8)) == []
    assert moves(consolidate([low, engine("n", "both", 0.5)], 0.8)) == [("a", "low", "n")]


def queued(load: float, share: float, name: str = "source", running: Sequence[SequenceView] = ()) -> LoadedEngine:
    head = sequence("head", tokens=900, running=False, share=share, age=2)
    behind = sequence("behind", running=False, share=0.01, age=1)
    return LoadedEngine(name, "both", load, [*running, head, behind], waiting=2)


def test_what_waits_since_it_does_not_fit_goes_where_it_fits_best() -> None:
    fleet = [queued(0.8, 0.3), engine("a", "both", 0.5), engine("b", "both", 0.65), engine("c", "both", 0.75)]
    assert moves(defragment(fleet)) == [("head", "source", "b")]


def test_an_engine_with_room_for_its_queue_is_left_alone() -> None:
    assert moves(defragment([queued(0.7, 0.3), engine("a", "both", 0.0)])) == []


def test_where_it_fits_nowhere_the_engine_with_the_most_room_makes_more() -> None:
    roomy = engine("roomy", "both", 0.8, shares(x=0.1, y=0.2, z=0.3))
    fleet = [queued(0.9, 0.39), roomy, engine("full", "both", 0.85)]
    assert moves(defragment(fleet)) == []  # it takes x and y, and y fits nowhere
    roomy = engine("roomy", "both", 0.8, shares(x=0.1, y=0.1, z=0.3))
    fleet = [queued(0.9, 0.39), roomy, engine("full", "both", 0.85)]
    assert moves(defragment(fleet)) == [("x", "roomy", "source"), ("y", "roomy", "full")]
    assert roomy.free >= 0.39


def test_room_is_made_where_the_queue_is_if_that_takes_least() -> None:
    source = queued(0.75, 0.3, running=shares(x=0.1, y=0.5))
    assert moves(defragment([source, engine("other", "both", 0.85)])) == [("x", "source", "other")]


def test_room_is_made_for_one_at_a_time() -> None:
    target = engine("target", "both", 0.25, shares(x=0.125, y=0.125))
    crowd = [queued(0.375, 0.875, "first"), target, queued(0.25, 1.0, "second")]
    assert [each[0] for each in moves(defragment(crowd))] == ["x"]


PACKING: dict[str, Callable[[Sequence[LoadedEngine], float], Iterable[Wanted]]] = {
    "mitigate": lambda engines, ceiling: mitigate(engines, ceiling, ALL),
    "consolidate": consolidate,
    "defragment": lambda engines, ceiling: defragment(engines),
}


@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(0.001, 0.4), max_size=5), st.integers(0, 3), st.lists(st.floats(0.01, 1), max_size=3)
        ),
        min_size=1,
        max_size=6,
    ),
    st.floats(0.1, 1),
)
def test_packing_never_overfills_an_engine(fleet: list[tuple[list[float], int, list[float]]], ceiling: float) -> None:
    def engines() -> list[LoadedEngine]:
        return [
            LoadedEngine(
                f"e{at}", "both", min(1.0, sum(running)),
                [sequence(f"{at}.{n}", share=share) for n, share in enumerate(running)]
                + [sequence(f"{at}.w{n}", running=False, share=share, age=n) for n, share in enumerate(waiting)],
                waiting=min(in_queue, len(waiting)),
            )
            for at, (running, in_queue, waiting) in enumerate(fleet)
        ]  # fmt: skip

    for name, policy in PACKING.items():
        here = engines()
        before = {each.name: each.believed for each in here}
        found = list(policy(here, ceiling))
        assert len({each.seq_id for each in found}) == len(found)
        for each in here:
            assert each.believed <= max(1.0 if name == "defragment" else ceiling, before[each.name]) + 1e-9
        assert name != "consolidate" or len({each.source for each in found}) <= 1


# ---- policies by name --------------------------------------------------------------------------------------------

TEN_LINES = """
from tercet.decisions.migration import least_loaded, move

def oldest_first(engines):
    for engine in engines:
        idle = least_loaded(other for other in engines if not other.sequences)
        if engine.waiting and idle:
            yield move(max(engine.sequences, key=lambda each: each.age), engine, idle, "oldest_first")
"""


def test_a_policy_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TEN_LINES)
    (policy,) = policies_of(RescheduleSettings(policies=(f"{file}:oldest_first",)))
    fleet = [queued(0.9, 0.4), engine("idle", "both", 0.0)]
    assert moves(policy(fleet)) == [("head", "source", "idle")]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_policy_takes_a_fleet(name: str) -> None:
    (policy,) = policies_of(RescheduleSettings(policies=(name,)))
    assert list(policy([engine("a", "both", None), engine("b", "decode", 0.5)])) == []


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("decode_lod", "there is no policy 'decode_lod'; choose one of prefill_to_decode, decode_load"),
        ("missing.py:f", "there is no file missing.py"),
    ],
)
def test_a_policy_that_there_is_not(name: str, complaint: str) -> None:
    with pytest.raises(BadRequest, match=complaint):
        policies_of(RescheduleSettings(policies=(name,)))


def test_a_policy_that_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def breaks(engines: Sequence[LoadedEngine]) -> Iterable[Wanted]:
        yield Wanted("fine", "a", "b", "mine")
        raise ZeroDivisionError

    def talks(engines: Sequence[LoadedEngine]) -> Any:
        return ["move it"]

    def last(engines: Sequence[LoadedEngine]) -> Iterable[Wanted]:
        return [Wanted("fine", "a", "c", "late"), Wanted("also", "a", "c", "late")]

    rescheduling = Rescheduling([breaks, talks, last])
    for _ in range(2):
        assert [(each.seq_id, each.reason) for each in rescheduling.wanted([])] == [("fine", "mine"), ("also", "late")]
    assert caplog.text.count("raise ZeroDivisionError") == 1
    assert caplog.text.count("TypeError: it proposes 'move it'") == 1


def test_a_sequence_is_left_alone_for_a_while() -> None:
    rescheduling = Rescheduling([])
    rescheduling.moved("a", now=10.0)
    rescheduling.begins(now=11.9)
    assert rescheduling.leaves_alone("a")
    rescheduling.begins(now=12.1)
    assert not rescheduling.leaves_alone("a")


# ---- engines of several revisions --------------------------------------------------------------------------------

OLD, NEW = Revision("0.3.0", "0.32.0", "weights"), Revision("0.3.0", "0.33.0", "weights")


def rolling(*engines: LoadedEngine) -> list[LoadedEngine]:
    """Those whose name begins with ``new`` have another version of vLLM."""
    return [replace(each, revision=NEW if each.name.startswith("new") else OLD) for each in engines]


@pytest.mark.parametrize(
    "policy",
    [
        drain,
        failover,
        prefill_to_decode,
        partial(balance, roles=("decode", "both"), threshold=0.1, selection=Selection("SR", value=9), reason="r"),
        partial(mitigate, ceiling=0.5, selection=Selection("SR", value=9)),
        partial(consolidate, ceiling=0.95),
        defragment,
    ],
)
@given(data=st.data())
def test_nothing_moves_between_engines_that_exchange_no_kv(policy: Any, data: st.DataObject) -> None:
    made = list[LoadedEngine]()
    for index in range(data.draw(st.integers(2, 6))):
        age, role = (
            data.draw(st.sampled_from(["old", "new"])),
            data.draw(st.sampled_from(["prefill", "decode", "both"])),
        )
        held = [sequence(f"{index}-{each}", running=each != 2) for each in range(data.draw(st.integers(0, 3)))]
        load = data.draw(st.floats(0, 1))
        state = {name: data.draw(st.booleans()) for name in ("draining", "stale")}
        made.append(LoadedEngine(f"{age}-{index}", role, load, held, waiting=len(held) == 3, **state))  # type: ignore[arg-type]
    for wanted in policy(rolling(*made)):
        assert wanted.source[:3] == wanted.destination[:3]


def test_a_drained_engine_is_emptied_within_its_revision_or_not_at_all() -> None:
    source = engine("old", "decode", 0.4, [sequence("a")], draining=True)
    assert moves(drain(rolling(source, engine("new-d", "decode", 0.0), engine("old-p", "prefill", 0.9)))) == [
        ("a", "old", "old-p")
    ]
    assert not moves(drain(rolling(source, engine("new-d", "decode", 0.0))))


def test_what_a_users_policy_proposes_across_revisions_is_dropped() -> None:
    def across(engines: Sequence[LoadedEngine]) -> list[Wanted]:
        return [Wanted("a", "old", "new", "mine"), Wanted("b", "old", "old-2", "mine")]

    engines = rolling(*(engine(name, "both", 0.1) for name in ("old", "old-2", "new")))
    assert moves(Rescheduling([across]).wanted(engines)) == [("b", "old", "old-2")]
