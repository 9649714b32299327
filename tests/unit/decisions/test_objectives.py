"""Whether a request met its objectives: the same rule for one request and for columns of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.cluster.up_config import UpConfig
from tercet.decisions.objectives import Attainment, Attainments, meets, within
from tercet.protocol import BadRequest, Request
from tercet.settings.declaration import Source, decode_settings
from tercet.settings.fleet_settings import ObjectiveClass, Objectives, require_objectives
from tercet_lab.bench.simulated.scenario import classed, slo_of_class
from tercet_lab.planner_settings import weights_of
from tercet_lab.slo import Slo
from tercet_lab.tables import Requests

LATENCY = st.none() | st.floats(0.001, 10)


def test_a_latency_at_the_limit_meets_it() -> None:
    objectives = Objectives(ttft=1.0, tpot=0.025)
    assert meets(objectives, 1.0, 0.025)
    assert not meets(objectives, 1.001, 0.025)
    assert not meets(objectives, 1.0, 0.0251)


def test_an_answer_of_one_token_has_no_tpot_to_miss() -> None:
    assert meets(Objectives(ttft=1.0, tpot=0.025), 0.5, None)


def test_without_objectives_every_answer_will_do() -> None:
    assert meets(Objectives(), 1e6, 1e6)


@given(ttft=LATENCY, tpot=LATENCY, ttft_limit=LATENCY, tpot_limit=LATENCY)
def test_columns_follow_the_same_rule(
    ttft: float | None, tpot: float | None, ttft_limit: float | None, tpot_limit: float | None
) -> None:
    columns = [np.array([math.nan if value is None else value]) for value in (ttft, tpot)]
    together = all(
        limit is None or within(values, limit).all()
        for values, limit in zip(columns, (ttft_limit, tpot_limit), strict=True)
    )
    assert together == meets(Objectives(ttft=ttft_limit, tpot=tpot_limit), ttft, tpot)


def test_the_benchmark_goes_by_it() -> None:
    """Requests of 11 tokens: TTFT 0.5 and 2 s, TPOT 0.1 s; one failed."""
    nan = math.nan
    samples = Requests.of({
        "scheduled": np.zeros(3), "sent": np.zeros(3), "first_token": [0.5, 2.0, nan], "last_token": [1.5, 3.0, nan],
        "input_tokens": np.ones(3), "output_tokens": [11, 11, 0], "ok": [True, True, False], "ended": [1.5, 3.0, 1.0],
    })  # fmt: skip
    objectives = Objectives(ttft=1.0, tpot=0.1)
    assert samples.meets(Slo(ttft=1.0, tpot=0.1)).tolist() == [True, False, False]
    assert [meets(objectives, ttft, 0.1) for ttft in (0.5, 2.0)] == [True, False]


def test_a_simulated_run_counts_each_request_by_its_class() -> None:
    """Requests of 11 tokens: TTFT 2 s, TPOT 0.1 s."""
    batch = ObjectiveClass("batch", ttft=30.0)
    classes, ones = ("default", "batch", "batch"), np.ones(3)
    samples = Requests.of({
        "klass": classes, "scheduled": np.zeros(3), "sent": np.zeros(3), "first_token": 2 * ones,
        "last_token": 3 * ones, "input_tokens": ones, "output_tokens": 11 * ones,
        "ok": [True, True, False], "ended": 3 * ones,
    }, {"batch": slo_of_class(batch)})  # fmt: skip
    assert samples.meets(Slo(ttft=1.0)).tolist() == [False, True, False]
    assert samples.attainment(Slo(ttft=1.0)) == {"default": 0.0, "batch": 0.5}


def test_simulated_requests_are_of_classes_by_their_weights() -> None:
    classes = Objectives(classes=(ObjectiveClass("batch", ttft=30.0),))
    for traffic, said in (
        ({}, "weight of class batch is missing"),
        ({"x": "1"}, "x is not a class"),
        ({"batch": "0"}, "positive"),
    ):
        with pytest.raises(BadRequest, match=said):
            weights_of(traffic, classes)
    weights = weights_of({"batch": "1", "default": "3"}, classes)
    arrivals = [(float(number), Request(seq_id=f"r{number}", prompt=(1,))) for number in range(400)]
    found = [request.headers.get("h", "") for _, request in classed(arrivals, weights, "h", 0)]
    assert {*found} == {"", "batch"}
    assert 60 < found.count("batch") < 140
    assert found == [request.headers.get("h", "") for _, request in classed(arrivals, weights, "h", 0)]


def test_failures_count_against_attainment() -> None:
    attainment = Attainment(Objectives(ttft=1.0))
    assert attainment.ended_with(0.5, None)
    assert not attainment.ended_with(1.5, None)
    attainment.failed()
    assert (attainment.ended, attainment.met) == (3, 1)


CLASSES = ("interactive,ttft=0.5,share=0.95", {"name": "batch", "ttft": 30.0, "tpot": 0.2})


def request(headers: dict[str, str], background: bool = False) -> Request:
    return Request(seq_id="s", prompt=(1,), headers=headers, background=background)


def test_a_header_names_the_class_of_a_request() -> None:
    found = decode_settings(Objectives, Source({"objective-class": CLASSES, "objective-ttft": 1.0}))
    assert found.classes == (ObjectiveClass("interactive", 0.5, None, 0.95), ObjectiveClass("batch", 30.0, 0.2))
    attainments = Attainments(found)
    asked = ({}, {found.header: "batch"}, {found.header: "unheard-of"}, {found.header: "interactive"})
    for headers in asked:
        attainment = attainments.of(request(headers))
        assert attainment is not None
        attainment.ended_with(0.7, None)
    assert attainments.counts() == {"default": (2, 2), "interactive": (1, 0), "batch": (1, 1)}


def test_without_objectives_of_its_own_a_request_counts_nowhere() -> None:
    attainments = Attainments(Objectives(classes=(ObjectiveClass("batch", ttft=30.0),)))
    assert attainments.of(request({})) is None
    assert attainments.of(request({"x-objective-class": "batch"})) is not None
    assert attainments.of(request({"x-objective-class": "batch"}, background=True)) is None


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        (["a"], "^objective-class: a has neither ttft nor tpot"),
        (["a,ttft=1", "a,tpot=1"], "different name"),
        (["default,ttft=1"], "different name"),
        (["a,ttft=soon"], "ttft"),
        (["a,ttft=1,shares=0.9"], "shares"),
        (["a b,ttft=1"], "name"),
        ([f"c{number},ttft=1" for number in range(17)], "at most 16"),
    ],
)
def test_classes_that_cannot_be_are_refused(classes: list[str], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        decode_settings(Objectives, Source({"objective-class": classes}))


@pytest.mark.parametrize("objectives", [Objectives(), Objectives(ttft=1.0), Objectives(tpot=0.02)])
def test_roles_need_both_objectives(objectives: Objectives) -> None:
    require_objectives("fixed", objectives)
    with pytest.raises(BadRequest, match="--objective-ttft and --objective-tpot"):
        require_objectives("auto", objectives)


def test_no_property_of_a_fleet_hides_a_setting_of_its_router() -> None:
    hidden = [name for name in UpConfig.__struct_fields__ if isinstance(getattr(UpConfig, name, None), property)]
    assert hidden == []
