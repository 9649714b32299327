"""Whether a request met its objectives: the same rule for one request and for columns of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.cluster.up_config import UpConfig
from tercet.decisions.objectives import Attainment, meets, within
from tercet.lab.bench.summary import MS, Samples, Slo
from tercet.protocol import BadRequest
from tercet.settings.role_settings import Objectives, require_objectives

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
    samples = Samples(
        scheduled=np.zeros(3), sent=np.zeros(3), first=np.array([0.5, 2.0, nan]), last=np.array([1.5, 3.0, nan]),
        input_tokens=np.ones(3), output_tokens=np.array([11.0, 11.0, 0.0]), ok=np.array([True, True, False]),
        itl=np.empty(0), ended=np.array([1.5, 3.0, 1.0]),
    )  # fmt: skip
    objectives = Objectives(ttft=1.0, tpot=0.1)
    assert samples.meets(Slo(ttft=1.0 * MS, tpot=0.1 * MS)).tolist() == [True, False, False]
    assert [meets(objectives, ttft, 0.1) for ttft in (0.5, 2.0)] == [True, False]


def test_failures_count_against_attainment() -> None:
    attainment = Attainment(Objectives(ttft=1.0))
    assert attainment.ended_with(0.5, None)
    assert not attainment.ended_with(1.5, None)
    attainment.failed()
    assert (attainment.ended, attainment.met) == (3, 1)


@pytest.mark.parametrize("given_ones", [{}, {"ttft": 1.0}, {"tpot": 0.02}])
def test_roles_need_both_objectives(given_ones: dict[str, float]) -> None:
    require_objectives("fixed", Objectives(**given_ones))
    with pytest.raises(BadRequest, match="--objective-ttft and --objective-tpot"):
        require_objectives("auto", Objectives(**given_ones))


def test_no_property_of_a_fleet_hides_a_setting_of_its_router() -> None:
    hidden = [name for name in UpConfig.__struct_fields__ if isinstance(getattr(UpConfig, name, None), property)]
    assert hidden == []
