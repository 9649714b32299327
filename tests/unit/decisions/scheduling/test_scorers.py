"""Scorers: their formulas, and what they make of engines that nobody knows anything of."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.decisions.scheduling.plugin import Scorer
from tercet.decisions.scheduling.scorers import (
    ActiveRequestScorer,
    KVCacheUtilizationScorer,
    LoadAwareScorer,
    LoraAffinityScorer,
    NoHitLRUScorer,
    PrecisePrefixCacheScorer,
    PrefixCacheScorer,
    QueueScorer,
    RunningRequestsSizeScorer,
    SessionAffinityScorer,
    TokenLoadScorer,
)
from tercet.protocol import AdapterLoad, EngineLoad, Request

from .builders import Bench, View, listed, request_of

ALL = [
    ActiveRequestScorer(),
    KVCacheUtilizationScorer(),
    LoadAwareScorer(),
    LoraAffinityScorer(),
    NoHitLRUScorer(),
    PrecisePrefixCacheScorer(),
    PrefixCacheScorer(block_size=2),
    QueueScorer(),
    RunningRequestsSizeScorer(),
    SessionAffinityScorer(),
    TokenLoadScorer(),
]


def three(**of_each: list[int] | list[float]) -> Bench:
    bench = Bench(View("a"), View("b"), View("c"))
    for index, name in enumerate("abc"):
        bench.report(name, **{field: values[index] for field, values in of_each.items()})  # type: ignore[arg-type]
    return bench


@pytest.mark.parametrize(("scorer", "field"), [(QueueScorer(), "waiting"), (RunningRequestsSizeScorer(), "running")])
def test_queue_and_running_go_from_the_least_to_the_most(scorer: Scorer, field: str) -> None:
    assert three(**{field: [2, 6, 4]}).scores(scorer) == [1.0, 0.0, 0.5]
    assert three(**{field: [3, 3, 3]}).scores(scorer) == [1.0, 1.0, 1.0]


def test_kv_utilization_is_what_is_free() -> None:
    assert three(kv=[0.0, 0.25, 1.0]).scores(KVCacheUtilizationScorer()) == [1.0, 0.75, 0.0]


def test_load_aware_starts_at_a_half_and_ends_at_the_threshold() -> None:
    assert three(waiting=[0, 64, 500]).scores(LoadAwareScorer()) == [0.5, 0.25, 0.0]
    assert three(waiting=[0, 5, 10]).scores(LoadAwareScorer(threshold=10)) == [0.5, 0.25, 0.0]


def test_active_requests_are_the_routers_own() -> None:
    bench = Bench(View("a"), View("b", in_flight=4), View("c", in_flight=1))
    assert bench.scores(ActiveRequestScorer()) == [1.0, 0.0, 0.75]
    assert Bench(View("a"), View("b")).scores(ActiveRequestScorer()) == [1.0, 1.0]


def test_token_load_takes_the_larger_of_both_counts() -> None:
    bench = Bench(View("a", in_flight_tokens=50), View("b", in_flight_tokens=10), View("c"))
    bench.report("a", tokens=20)
    bench.report("b", tokens=80)
    assert bench.scores(TokenLoadScorer(queue_threshold_tokens=100)) == pytest.approx([0.5, 0.2, 1.0])


@pytest.mark.parametrize(
    ("scorer", "middle"),
    [
        (QueueScorer(), 0.5),
        (RunningRequestsSizeScorer(), 0.5),
        (KVCacheUtilizationScorer(), 0.5),
        (LoadAwareScorer(), 0.25),
    ],
)
def test_what_is_stale_gets_the_middle(scorer: Scorer, middle: float) -> None:
    bench = Bench(View("old"), View("new"), View("never"))
    bench.report("old", waiting=100, running=100, kv=1.0)
    bench.now += 1.001
    bench.report("new")
    old, new, never = bench.scores(scorer)
    assert (old, never) == (middle, middle)
    assert new == 2 * middle


@pytest.mark.slow
@pytest.mark.parametrize("scorer", ALL, ids=lambda scorer: type(scorer).__name__)
@given(
    waiting=st.lists(st.integers(0, 10**6), min_size=1, max_size=6),
    known=st.lists(st.booleans(), min_size=6, max_size=6),
    flying=st.lists(st.integers(0, 10**8), min_size=6, max_size=6),
)
def test_scores_are_from_0_to_1_but_for_token_load(
    scorer: Scorer, waiting: list[int], known: list[bool], flying: list[int]
) -> None:
    bench = Bench(*(View(f"e{n}", in_flight=flying[n], in_flight_tokens=flying[n]) for n in range(len(waiting))))
    for n, queue in enumerate(waiting):
        if known[n]:
            bench.report(f"e{n}", waiting=queue, running=queue, kv=min(queue, 10) / 10)
    scores = np.array(bench.scores(scorer, request_of(1, 2, 3, 4, x_session_token="u")))
    assert len(scores) == len(waiting)
    assert (scores <= 1).all()
    # A token load past the threshold is cut off by the profile, as any score is.
    assert (scores >= 0).all() or isinstance(scorer, TokenLoadScorer)


# ---- prefixes ------------------------------------------------------------------------------------------------------


def test_a_prompt_is_believed_where_it_was_routed() -> None:
    bench, scorer = Bench(View("a"), View("b"), View("c")), PrefixCacheScorer(block_size=2)
    first = bench.decision(request_of(1, 2, 3, 4, 5, 6))
    assert listed(scorer.score(first, bench.engines)) == [0, 0, 0]
    scorer.picked(first, int(bench.engines.rows[1]))
    assert bench.scores(scorer, request_of(1, 2, 3, 4, 9, 9, 9, 9)) == [0, 0.5, 0]
    assert bench.scores(scorer, request_of(9, 2, 3, 4, 5, 6)) == [0, 0, 0]


def test_salts_keep_prompts_apart() -> None:
    bench, scorer = Bench(View("a")), PrefixCacheScorer(block_size=2)
    scorer.picked(bench.decision(request_of(1, 2, 3, 4, salt="x")), 0)
    assert bench.scores(scorer, request_of(1, 2, 3, 4, salt="x")) == [1.0]
    assert bench.scores(scorer, request_of(1, 2, 3, 4, salt="y")) == [0.0]
    assert bench.scores(scorer, request_of(1, 2, 3, 4)) == [0.0]


def test_only_so_many_blocks_are_matched() -> None:
    bench, scorer = Bench(View("a")), PrefixCacheScorer(block_size=1, max_prefix_blocks_to_match=2)
    scorer.picked(bench.decision(request_of(1, 2, 3)), 0)
    assert bench.scores(scorer, request_of(1, 2, 7, 8, 9)) == [1.0]


def test_a_prompt_shorter_than_a_block_matches_nothing() -> None:
    bench, scorer = Bench(View("a")), PrefixCacheScorer(block_size=4)
    decision = bench.decision(request_of(1, 2, 3))
    scorer.picked(decision, 0)
    assert listed(scorer.score(decision, bench.engines)) == [0.0]


def test_precise_is_what_engines_said_in_whatever_block_size() -> None:
    bench = Bench(View("a"), View("b"))
    bench.knowledge.store("a", 2, ["h1"], None, [1, 2])
    bench.knowledge.store("b", 4, ["k1"], None, [1, 2, 3, 4])
    decision = bench.decision(request_of(1, 2, 3, 4))
    assert listed(PrecisePrefixCacheScorer().score(decision, bench.engines)) == [0.5, 1.0]
    assert decision.matched is not None
    assert decision.matched[bench.engines.rows].tolist() == [2, 4]
    bench.knowledge.unstore("b", ["k1"])
    assert bench.scores(PrecisePrefixCacheScorer(), request_of(1, 2, 3, 4)) == [0.5, 0.0]


# ---- sessions ------------------------------------------------------------------------------------------------------


def home(bench: Bench, session: str) -> str:
    scores = bench.scores(SessionAffinityScorer(), request_of(1, x_session_token=session))
    assert sorted(scores)[-2:] in ([0.0, 1.0], [1.0])
    return bench.views[scores.index(1.0)].name


def test_a_session_has_one_home_and_only_those_of_an_engine_that_leaves_move() -> None:
    names = [f"e{n}" for n in range(8)]
    all_of_them, sessions = Bench(*map(View, names)), [f"user-{n}" for n in range(400)]
    before = {session: home(all_of_them, session) for session in sessions}
    counts = Counter(before.values())
    assert set(counts) == set(names)
    assert max(counts.values()) < 3 * min(counts.values())
    without = Bench(*map(View, reversed(names[1:])))  # in another order and without one
    after = {session: home(without, session) for session in sessions}
    assert {s for s in sessions if before[s] != after[s]} == {s for s in sessions if before[s] == "e0"}


def test_a_session_leaves_a_home_that_is_overloaded_and_comes_back() -> None:
    bench = Bench(View("a"), View("b"), View("c"))
    own = home(bench, "u")
    view = next(view for view in bench.views if view.name == own)
    view.in_flight = 9
    other = home(bench, "u")
    assert other != own
    view.in_flight = 0
    assert home(bench, "u") == own


def test_without_a_session_nobody_is_preferred() -> None:
    bench = Bench(View("a"), View("b"))
    assert bench.scores(SessionAffinityScorer(), request_of(1)) == [0, 0]
    assert bench.scores(SessionAffinityScorer(), None) == [0, 0]
    assert sum(bench.scores(SessionAffinityScorer(header="x-user"), request_of(1, x_user="u"))) == 1


def test_sessions_of_other_clients() -> None:
    bench = Bench(*map(View, "abcdefgh"))
    expected = bench.scores(SessionAffinityScorer(), request_of(1, x_session_token="s7"))
    assert sum(expected) == 1
    in_body = msgspec.structs.replace(request_of(1), session="s7")
    for request in (request_of(1, x_dynamo_session_id="s7"), request_of(1, x_session_id="s7"), in_body):
        assert bench.scores(SessionAffinityScorer(by_user=False), request) == expected
    named = msgspec.structs.replace(
        request_of(1, x_dynamo_session_id="s7", x_session_id="other"), session="x", user="y"
    )
    assert bench.scores(SessionAffinityScorer(), named) == expected


def test_the_openai_user_is_a_session_where_no_header_is() -> None:
    bench = Bench(View("a"), View("b"), View("c"))
    plain = request_of(1)
    for user in ("ann", "bob"):
        by_user = bench.scores(SessionAffinityScorer(), msgspec.structs.replace(plain, user=user))
        assert by_user == bench.scores(SessionAffinityScorer(), request_of(1, x_session_token=user))
    both = msgspec.structs.replace(request_of(1, x_session_token="ann"), user="bob")
    assert bench.scores(SessionAffinityScorer(), both) == bench.scores(
        SessionAffinityScorer(), request_of(1, x_session_token="ann")
    )
    nobody = bench.scores(SessionAffinityScorer(by_user=False), msgspec.structs.replace(plain, user="ann"))
    assert not any(nobody)


# ---- new prompts ---------------------------------------------------------------------------------------------------


def cold(bench: Bench, scorer: NoHitLRUScorer, row: int) -> None:
    scorer.picked(bench.decision(request_of(1)), row)


def test_new_prompts_go_to_who_took_one_the_longest_ago() -> None:
    bench, scorer = Bench(View("a"), View("b"), View("c")), NoHitLRUScorer()
    assert bench.scores(scorer) == [1.0, 0.5, 0.0]
    cold(bench, scorer, 1)
    cold(bench, scorer, 0)
    assert bench.scores(scorer) == [0.0, 0.5, 1.0]
    cold(bench, scorer, 1)
    assert bench.scores(scorer) == [0.5, 0.0, 1.0]


def test_a_prompt_that_somebody_has_is_no_new_one() -> None:
    bench, scorer = Bench(View("a"), View("b")), NoHitLRUScorer()
    decision = bench.decision(request_of(1))
    decision.note_match(np.array([0, 1, 0, 0, 0, 0, 0, 0]))
    assert listed(scorer.score(decision, bench.engines)) == [0.5, 0.5]
    scorer.picked(decision, 0)
    assert bench.scores(scorer) == [1.0, 0.0]


def test_only_the_latest_engines_are_remembered() -> None:
    bench, scorer = Bench(View("a"), View("b"), View("c")), NoHitLRUScorer(lru_size=1)
    cold(bench, scorer, 0)
    cold(bench, scorer, 1)
    assert bench.scores(scorer) == [1.0, 0.0, 0.5]


def test_one_engine_alone_gets_1() -> None:
    assert Bench(View("a")).scores(NoHitLRUScorer()) == [1.0]


def test_lora_affinity_is_llm_ds() -> None:
    """1 where it runs, 0.8 where there is room, 0.6 where it waits, else 0; the base model runs nowhere."""
    bench = Bench(*(View(name) for name in ("runs", "room", "waits", "full", "none", "silent")))
    loads = {
        "runs": AdapterLoad(("a", "b"), ("c",), 2),
        "room": AdapterLoad(("b",), ("b",), 2),
        "waits": AdapterLoad(("b", "c"), ("a",), 2),
        "full": AdapterLoad(("b",), ("c",), 2),
        "none": None,
    }
    for name, adapters in loads.items():
        bench.knowledge.loads.report(name, EngineLoad(waiting=0, running=0, kv_usage=0.0, adapters=adapters))
    scorer = LoraAffinityScorer()
    assert bench.scores(scorer, Request(seq_id="s", prompt=(1,), adapter="a")) == [1.0, 0.8, 0.6, 0.0, 0.0, 0.0]
    assert bench.scores(scorer, Request(seq_id="s", prompt=(1,))) == [0.0, 0.8, 0.0, 0.0, 0.0, 0.0]
    bench.now += 10
    assert bench.scores(scorer, Request(seq_id="s", prompt=(1,), adapter="a")) == [0.0] * 6
