"""Which router gets a request: by the name, by weights, and only among those that answer."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tercet.protocol import BadRequest, EngineUnreachable, UnknownModel
from tercet_gateway.model_router import ModelRoutes, WeightedRouter


def backend(url: str, *models: str, weight: float = 1.0, answers: bool = True) -> WeightedRouter:
    return WeightedRouter(url, weight, {name: {"id": name} for name in models} if models else None, answers)


def test_each_model_has_its_router() -> None:
    routes = ModelRoutes([backend("u", "a", "alias"), backend("v", "b")])
    assert [routes.choose(name, 0.5).url for name in ("a", "alias", "b")] == ["u", "u", "v"]
    assert [entry["id"] for entry in routes.listed()] == ["a", "alias", "b"]


def test_an_unknown_name_is_one_only_once_all_have_said_what_they_serve() -> None:
    known, late = backend("u", "a"), backend("v", answers=False)
    routes = ModelRoutes([known, late])
    with pytest.raises(EngineUnreachable, match="have not yet listed their models: v"):
        routes.choose("b", 0.5)
    late.models, late.answers = {"c": {}}, True
    with pytest.raises(UnknownModel, match=r"^The model `b` does not exist\.$"):
        routes.choose("b", 0.5)
    late.answers = False  # what it said still holds: its model is not unknown
    with pytest.raises(EngineUnreachable, match="no router of the model 'c' is available now: v"):
        routes.choose("c", 0.5)


def test_without_a_name_there_must_be_one_model() -> None:
    assert ModelRoutes([backend("u", "a", "alias"), backend("v", "a")]).only_model() == "a"
    with pytest.raises(BadRequest, match="choose one of a, b"):
        ModelRoutes([backend("u", "a"), backend("v", "b")]).only_model()


@given(st.lists(st.floats(0, 10), min_size=1, max_size=5), st.integers(0, 2**32))
@example([5e-324, 5e-324], 0)
def test_requests_are_shared_by_weight(weights: list[float], seed: int) -> None:
    routes = ModelRoutes([backend(str(place), "a", weight=weight) for place, weight in enumerate(weights)])
    if not any(weights):
        with pytest.raises(EngineUnreachable):
            routes.choose("a", 0.5)
        return
    random, draws = Random(seed), 500
    found = Counter(routes.choose("a", random.random()).url for _ in range(draws))
    for place, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(found[str(place)] / draws - share) < 0.12
        assert weight or not found[str(place)]


def test_the_largest_draw_is_in_range() -> None:
    routes = ModelRoutes([backend("u", "a", weight=0.1), backend("v", "a", weight=0.2), backend("w", "b")])
    assert routes.choose("a", 1.0 - 2**-53).url == "v"


def test_the_silent_and_the_failed_are_left_out() -> None:
    first, second = backend("u", "a"), backend("v", "a")
    routes = ModelRoutes([first, second])
    assert {routes.choose("a", draw, {first}).url for draw in (0.0, 0.5, 0.9)} == {"v"}
    second.answers = False
    assert {routes.choose("a", draw).url for draw in (0.0, 0.5, 0.9)} == {"u"}
    with pytest.raises(EngineUnreachable):
        routes.choose("a", 0.5, {first})


def test_replacing_keeps_what_is_known_of_those_that_stay() -> None:
    stays, leaves = backend("u", "a"), backend("v", "b")
    stays.in_flight = 3
    routes = ModelRoutes([stays, leaves])
    new, left = routes.replaced([("w", 1.0), ("u", 0.25)])
    assert ([each.url for each in new], left) == (["w"], [leaves])
    assert routes.backends == [*new, stays]
    assert (stays.weight, stays.in_flight, stays.models) == (0.25, 3, {"a": {"id": "a"}})
