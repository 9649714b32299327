"""Which engine should send KV that it has cached, and whether a route with a pull is the cheapest."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.decisions.cost.costs import Costs, Targets
from tercet.decisions.cost.engine_work import CostModel, Job
from tercet.decisions.cost.pulls import CHEAPER, LEAST_PATIENCE_S, MOST_FROM_STORE, MOST_PULLS, Pulls
from tercet.protocol import Request
from tests.clock import Clock

from .test_costs import model_of_a_cpu

LENGTH = 2000


def pulls(send: float = 0.0, per_token: float = 1e-5) -> Pulls:
    model = CostModel()
    for tokens in range(100, 3000, 100):
        model.sent(send + per_token * tokens, tokens)
    return Pulls(model, random.Random(0))


def test_no_pull_costs_more_than_computing() -> None:
    slow, quick = pulls(per_token=1e-3), pulls(per_token=1e-5)
    for each, pulled in ((slow, False), (quick, True)):
        found = each.choose(LENGTH, 0, {"a": 1600}, {}, lambda end: 1e-4 * end)
        assert (found is not None) == pulled
    constant = pulls(send=0.5)
    assert constant.choose(LENGTH, 1500, {"a": 1600}, {}, lambda end: 1e-3 * (end - 1500)) is None
    assert constant.choose(LENGTH, 0, {"a": 1600}, {}, lambda end: 1e-3 * end) is not None


@given(
    own=st.integers(0, LENGTH),
    holders=st.dictionaries(st.sampled_from("abcdef"), st.integers(0, LENGTH + 100)),
    per_token=st.floats(1e-7, 1e-2),
)
def test_whatever_engines_have_a_pull_is_worth_it(own: int, holders: dict[str, int], per_token: float) -> None:
    found = pulls().choose(LENGTH, own, holders, {"a": 3.0}, lambda end: per_token * (end - own))
    worth = {
        name
        for name, matched in holders.items()
        if own < min(matched, LENGTH - 1)
        and pulls()._model.send(min(matched, LENGTH - 1) - own) < CHEAPER * per_token * (min(matched, LENGTH - 1) - own)
    }
    assert (found is None) == (not worth)
    if found is not None:
        assert found.source in worth
        assert own < found.end <= min(holders[found.source], LENGTH - 1)
        assert found.seconds < found.computing <= found.patience
        assert found.patience >= LEAST_PATIENCE_S


def test_engines_that_save_nearly_the_same_are_drawn_by_load() -> None:
    each, drawn = pulls(), Counter[str]()
    holders = {"idle": 1600, "busy": 1616, "has little": 300}
    for _ in range(1000):
        found = each.choose(LENGTH, 0, holders, {"idle": 0.0, "busy": 9.0}, lambda end: 1e-3 * end)
        assert found is not None
        drawn[found.source] += 1
    assert drawn["idle"] == pytest.approx(1000 * 10 / 11, abs=40)
    assert drawn["has little"] == 0


def test_an_engine_sends_to_few_at_a_time() -> None:
    each = pulls()

    def source() -> str | None:
        found = each.choose(LENGTH, 0, {"a": 1600, "b": 800}, {}, lambda end: 1e-3 * end)
        return None if found is None else found.source

    with ExitStack() as stack:
        for name in ("a", "b"):
            assert source() == name
            for _ in range(MOST_PULLS):
                stack.enter_context(each.counted(name))
        assert source() is None
    assert source() == "a"
    assert not each._running


def test_a_store_is_asked_before_engines_and_sends_to_more_at_a_time() -> None:
    each = pulls()
    holders = {"a": 1616, "s": 1600, "t": 300}
    for _ in range(20):
        found = each.choose(LENGTH, 0, holders, {"a": 0.0}, lambda end: 1e-3 * end, ["s", "t"])
        assert found is not None
        assert found.source == "s"
    with ExitStack() as stack:
        for _ in range(MOST_FROM_STORE):
            assert each.choose(LENGTH, 0, {"s": 1600}, {}, lambda end: 1e-3 * end, ["s"]) is not None
            stack.enter_context(each.counted("s"))
        assert each.choose(LENGTH, 0, {"s": 1600}, {}, lambda end: 1e-3 * end, ["s"]) is None


# ---- routes --------------------------------------------------------------------------------------------------


def request_of(length: int = LENGTH) -> Request:
    return Request(seq_id="r", prompt=tuple(range(length)), sampling_params={"max_tokens": 100})


def learned(per_token: float) -> Costs:
    """Costs of a fleet whose engine ``a`` has three prefills in line."""
    costs = Costs(Clock(0.0), random.Random(0))
    costs.model = model_of_a_cpu()
    costs.pulls = Pulls(costs.model, random.Random(0))
    costs.model.transfers = 3
    for tokens in range(100, 3000, 100):
        costs.model.sent(per_token * tokens, tokens)
    for number in range(3):
        costs.work("a").begin(f"p{number}", Job(1500, output=100, seconds=costs.model.prefill(1500)))
    return costs


@pytest.mark.parametrize(("per_token", "kind"), [(1e-5, "pull"), (1e-2, "alone")])
def test_an_idle_engine_pulls_what_a_busy_one_has(per_token: float, kind: str) -> None:
    costs = learned(per_token)
    decision = costs.decide(request_of(), ["a", "b"], {"a": 1600}, Targets(), 0.0)
    assert (decision.kind, decision.chosen.decode) == (kind, "b")
    if kind == "pull":
        pull = decision.chosen.pull
        assert pull is not None
        assert (pull.source, pull.end, decision.chosen.split) == ("a", 1600, 1600)
        alone = next(each for each in decision.others if each.decode == "b" and not each.prefill)
        assert decision.chosen.ttft < 0.4 * alone.ttft, "the queue of the engine that sends does not count"


@pytest.mark.parametrize(("per_token", "kind"), [(1e-5, "pull"), (1e-2, "alone")])
def test_an_idle_engine_pulls_what_a_store_has(per_token: float, kind: str) -> None:
    decision = learned(per_token).decide(request_of(), ["a", "b"], {}, Targets(), 0.0, stored={"s": 1600})
    assert (decision.kind, decision.chosen.decode, decision.chosen.prefill) == (kind, "b", "")
    assert decision.chosen.pull is None or decision.chosen.pull.source == "s"


def test_an_idle_engine_that_has_the_prompt_serves_alone() -> None:
    costs = learned(1e-5)
    assert costs.decide(request_of(), ["a", "b"], {"a": 1600, "b": 1600}, Targets(), 0.0).kind == "alone"


def test_engines_that_may_not_exchange_kv_do_not_pull() -> None:
    costs = learned(1e-5)
    assert costs.decide(request_of(), ["a", "b"], {"a": 1600}, Targets(), 0.0, lambda *_: False).kind == "alone"
    assert costs.pull(request_of(), "b", {"a": 1600}, {}, lambda *_: False) is None
    assert costs.pull(request_of(), "b", {"a": 1600}, {}, lambda _, __: True) is not None


def test_sends_are_learned_from_and_counted_while_they_run() -> None:
    costs, clock = Costs(clock := Clock(0.0), random.Random(0)), clock
    before = costs.model.send(1000)
    for _ in range(20):
        with costs.pulling("a", 0) as reached:
            clock.now += 3.0
            reached(1000)
    assert costs.model.send(1000) == pytest.approx(3.0, rel=0.1) != before
    with costs.pulling("a", 0) as reached:
        clock.now += 100.0
        reached(0)
    assert costs.model.send(1000) == pytest.approx(3.0, rel=0.1), "nothing was sent"
