"""The order in which grammars are tried: cheap ones do not wait for expensive ones."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.vllm_plugin.core.grammar_time import LIMITS, MOST_VERDICTS, MOST_WAITING, GrammarQueue, Try, TryOutcome

LAST = len(LIMITS) - 1


def run(queue: GrammarQueue, costs: dict[str, float]) -> dict[str, float]:
    """Run all tries in virtual time, each with the CPU seconds that the grammar costs; return when each ended."""
    now, ended = 0.0, dict[str, float]()
    running: list[tuple[float, int, Try]] = []
    count = 0
    while len(queue):
        while (tried := queue.next_try()) is not None:
            count += 1
            heapq.heappush(running, (now + min(costs[str(tried.key)], tried.limit), count, tried))
        assert len(running) <= queue.places
        assert sum(each.level == LAST for _, _, each in running) <= max(1, queue.places - 1)
        now, _, tried = heapq.heappop(running)
        outcome = TryOutcome.FINE if costs[str(tried.key)] <= tried.limit else TryOutcome.OVER_LIMIT
        if queue.ended(tried, outcome):
            ended[str(tried.key)] = now
    return ended


def test_a_usual_grammar_does_not_wait_for_twenty_expensive_ones() -> None:
    queue = GrammarQueue()
    for number in range(20):
        queue.add(f"poison {number}", 1.0)
    queue.add("usual", 2.0)
    queue.add("large", 300.0)
    costs = {f"poison {number}": 100.0 for number in range(20)} | {"usual": 0.05, "large": 0.9}
    ended = run(queue, costs)
    assert ended["usual"] < 20 * LIMITS[0]
    assert ended["large"] < 20 * sum(LIMITS[:2])
    assert queue.verdict("usual") == queue.verdict("large") == ""
    assert all(queue.verdict(f"poison {number}") for number in range(20))


@given(
    st.dictionaries(st.text("abc", max_size=3), st.tuples(st.floats(0, 20), st.floats(0, 9)), max_size=12),
    st.integers(1, 4),
)
def test_each_grammar_has_the_verdict_of_its_own_cost(grammars: dict[str, tuple[float, float]], places: int) -> None:
    queue = GrammarQueue(places)
    for key, (_, price) in grammars.items():
        queue.add(key, price)
    assert run(queue, {key: cost for key, (cost, _) in grammars.items()}).keys() == grammars.keys()
    assert {key: queue.verdict(key) == "" for key in grammars} == {k: c <= LIMITS[-1] for k, (c, _) in grammars.items()}


def test_the_cheaper_one_is_first() -> None:
    queue = GrammarQueue(places=1)
    queue.add("dear", 9.0)
    queue.add("cheap", 1.0)
    tried = queue.next_try()
    assert tried == Try("cheap", 0)
    assert queue.next_try() is None
    assert tried is not None
    assert queue.ended(tried, TryOutcome.REFUSED, "no text matches")
    assert queue.verdict("cheap") == "no text matches"


def test_a_grammar_that_is_lost_is_tried_once_more_and_has_no_verdict_then() -> None:
    queue = GrammarQueue()
    queue.add("a", 0)
    assert not queue.ended(queue.next_try(), TryOutcome.LOST)  # pyright: ignore[reportArgumentType]
    assert queue.ended(queue.next_try(), TryOutcome.LOST)  # pyright: ignore[reportArgumentType]
    assert queue.verdict("a") is None
    assert len(queue) == 0


def test_a_full_queue_gives_up_what_it_would_try_last() -> None:
    queue = GrammarQueue(places=1)
    queue.add("tried twice", 0.0)
    tried = queue.next_try()
    assert tried is not None
    assert [queue.add(number, 1.0 + number) for number in range(MOST_WAITING - 1)] == [None] * (MOST_WAITING - 1)
    assert not queue.ended(tried, TryOutcome.OVER_LIMIT)
    assert queue.add("tried twice", 0.0) is None
    assert queue.add("usual", 5.0) == "tried twice"
    assert queue.add("usual", 5.0) is None
    assert queue.add("dearest", 1e9) == "dearest"
    assert queue.add("cheap", 1.0) == MOST_WAITING - 2
    assert len(queue) == MOST_WAITING


def test_what_no_request_needs_any_more_is_dropped_unless_it_is_tried_now() -> None:
    queue = GrammarQueue(places=1)
    queue.add("a", 0)
    queue.add("b", 1)
    assert queue.next_try() == Try("a", 0)
    assert (queue.drop("a"), queue.drop("b"), queue.drop("b")) == (False, True, False)
    assert len(queue) == 1


@pytest.mark.parametrize("more", [0, 3])
def test_the_oldest_verdicts_are_forgotten(more: int) -> None:
    queue = GrammarQueue()
    for number in range(MOST_VERDICTS + more):
        queue.decide(number, "")
    assert [queue.verdict(number) for number in range(more)] == [None] * more
    assert queue.verdict(more) == ""
