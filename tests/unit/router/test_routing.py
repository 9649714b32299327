"""The state machine of plans and versions, beside a model of it, and without any I/O."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.programs import data_parallel
from tercet.protocol import BadRequest
from tercet.protocol.wire import decode_call
from tercet.router.serve.plans import Plan, Rule, Share
from tercet.router.serve.service import REMEMBERED, Chosen, Routing, Version


def version(number: int, plan: Plan) -> Version:
    return Version(number, plan, {arm.label: data_parallel for arm in plan.arms})


def plan_of(*weights: float, **fields: Any) -> Plan:
    return Plan(split=tuple(Share(program=f"p{i}", weight=weight) for i, weight in enumerate(weights)), **fields)


def one(name: str) -> Plan:
    return Plan(program=name)


WEIGHTS = st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=6).filter(lambda weights: sum(weights) > 0)


# ---- which program -------------------------------------------------------------------------------------------


@given(WEIGHTS, st.floats(0, 1, exclude_max=True))
def test_a_draw_falls_into_the_part_of_its_program(weights: list[float], draw: float) -> None:
    chosen = Routing(version(1, plan_of(*weights)), 5).choose({}, "", draw)
    index = int(chosen.name[1:])
    below, total = sum(weights[:index]), sum(weights)
    assert weights[index] > 0
    assert below / total - 1e-9 <= draw <= (below + weights[index]) / total + 1e-9


@given(WEIGHTS)
def test_shares_are_the_weights(weights: list[float]) -> None:
    routing = Routing(version(1, plan_of(*weights)), 5)
    draws = 500
    found = Counter(routing.choose({}, "", (i + 0.5) / draws).name for i in range(draws))
    for index, weight in enumerate(weights):
        assert abs(found[f"p{index}"] - draws * (weight / sum(weights))) <= 2


@given(st.text(max_size=20), st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True))
def test_sticky_requests_stay_where_they_are(value: str, first: float, second: float) -> None:
    routing = Routing(version(1, plan_of(1, 1, 1, sticky="X-User")), 5)
    headers = {"x-user": value}
    assert routing.choose(headers, "", first) == routing.choose(headers, "", second)


def test_sticky_values_share_by_weight() -> None:
    routing = Routing(version(1, plan_of(3, 1, sticky="x-user")), 5)
    found = Counter(routing.choose({"x-user": str(i)}, "", 0.0).name for i in range(2000))
    assert 1350 < found["p0"] < 1650
    assert routing.choose({}, "", 0.0).name == "p0"
    assert routing.choose({}, "", 0.99).name == "p1"


RULES = (
    Rule(program="search", header="X-Team", value="search"),
    Rule(program="both", header="x-team", model="big"),
    Rule(program="teams", header="x-team"),
    Rule(program="models", model="big"),
)


@pytest.mark.parametrize(
    ("headers", "model", "expected"),
    [
        ({}, "", "default"),
        ({"x-other": "search"}, "small", "default"),
        ({"x-team": "search"}, "big", "search"),
        ({"x-team": "ads"}, "big", "both"),
        ({"x-team": "ads"}, "", "teams"),
        ({"x-team": ""}, "", "teams"),
        ({}, "big", "models"),
    ],
)
def test_the_first_rule_that_covers_a_request_decides(headers: dict[str, str], model: str, expected: str) -> None:
    routing = Routing(version(1, Plan(program="default", rules=RULES)), 5)
    assert routing.choose(headers, model, 0.5).name == expected


# ---- versions and failures -----------------------------------------------------------------------------------

EVENTS = st.lists(
    st.one_of(
        st.just(("swap",)),
        st.tuples(st.just("fail"), st.integers(0, 3), st.sampled_from(["p0", "p1"])),
        st.tuples(st.just("succeed"), st.integers(0, 3), st.sampled_from(["p0", "p1"])),
    ),
    max_size=80,
)  # fmt: skip


@given(st.integers(0, 4), EVENTS)
def test_versions_are_a_stack_and_failures_are_counted_in_a_row(limit: int, events: list[Any]) -> None:
    """Beside a model: a stack of numbers, and for the one on top a count for each program."""
    routing = Routing(version(1, plan_of(1, 1)), limit)
    stack, last, rows = [1], 1, Counter[str]()
    for event in events:
        if event[0] == "swap":
            last += 1
            stack.append(last)
            rows = Counter()
            routing.swap(version(last, plan_of(1, 1)))
            assert routing.returned is None
        else:
            what, back, name = event
            chosen = Chosen(max(1, last - back), name, data_parallel)
            mine = chosen.version == stack[-1]
            if what == "succeed":
                routing.succeeded(chosen)
                if mine:
                    rows[name] = 0
            else:
                returned = routing.failed(chosen, "why")
                rows[name] += mine
                expected = mine and len(stack) > 1 and 0 < limit <= rows[name]
                assert (returned is not None) == expected
                if returned is not None:
                    assert (returned.from_version, returned.program, returned.error) == (stack.pop(), name, "why")
                    assert returned.to_version == stack[-1]
                    assert returned.failures == limit
                    rows = Counter()
        stack = stack[-REMEMBERED - 1 :]
        assert routing.current.number == stack[-1]
        assert (routing.previous.number if routing.previous else None) == (stack[-2] if len(stack) > 1 else None)
        assert dict(routing.failures) == {name: count for name, count in rows.items() if count}


def test_a_program_that_fails_between_successes_stays() -> None:
    routing = Routing(version(1, one("a")), 3)
    routing.swap(version(2, one("b")))
    chosen = routing.choose({}, "", 0.0)
    for _ in range(10):
        assert routing.failed(chosen, "x") is None
        assert routing.failed(chosen, "x") is None
        routing.succeeded(chosen)
    assert routing.current.number == 2


# ---- plans as they come over the wire ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({}, "program"),
        ({"program": "a", "split": [{"program": "b"}]}, "program"),
        ({"program": ""}, "program"),
        ({"program": "a", "wieght": 1}, "wieght"),
        ({"program": "a", "args": {"x": [1]}}, "args"),
        ({"program": "a", "sticky": "x-user"}, "sticky"),
        ({"split": []}, "program"),
        ({"split": [{"program": "a", "weight": -1}]}, "weight"),
        ({"split": [{"program": "a", "weight": 0}]}, "weight"),
        ({"split": [{"program": "a", "weight": 1e308}, {"program": "b", "weight": 1e308}]}, "weight"),
        ({"split": [{"program": "a"}], "args": {"x": 1}}, "args"),
        ({"split": [{"program": "a"}, {"program": "a", "args": {"x": 1}}]}, "name"),
        ({"split": [{"program": "a"}, {"program": "b", "name": "a"}]}, "name"),
        ({"program": "a", "rules": [{"program": "b"}]}, "rules"),
        ({"program": "a", "rules": [{"program": "b", "model": "m", "value": "v"}]}, "value"),
        ({"program": "a", "rules": [{"header": "b"}]}, "program"),
    ],
)
def test_what_a_plan_may_not_be(body: Any, names: str) -> None:
    with pytest.raises(BadRequest, match=names):
        decode_call(msgspec.json.encode(body), Plan)


def test_one_program_may_have_several_shares_under_names_of_their_own() -> None:
    plan = decode_call(
        msgspec.json.encode(
            {
                "split": [
                    {"program": "a", "args": {"x": 1}, "weight": 9},
                    {"program": "a", "args": {"x": 2}, "name": "trial"},
                ],
                "rules": [{"program": "a", "args": {"x": "1"}, "header": "x-team"}],
            }
        ),
        Plan,
    )
    assert [arm.label for arm in plan.arms] == ["a", "trial", "a"]
    assert plan.total == 10
