"""Roles that follow the load in a simulation: the router's policy in virtual time, and what the report says of it."""

from __future__ import annotations

import json

import pytest

from tercet.protocol import BadRequest
from tercet.settings.fleet_settings import Objectives
from tercet_lab.bench.simulated import Experiment, Fleet, MovingSettings, SyntheticWorkload
from tercet_lab.bench.simulated.simulation import SimulatedPoint

OBJECTIVES = Objectives(ttft=1.0, tpot=0.025)
# More than two engines can prefill: their line grows until others help.
LONG_PROMPTS = SyntheticWorkload(rate=40.0, requests=240, input_mean=4000, output_mean=8)


def simulated(roles: str, workload: SyntheticWorkload = LONG_PROMPTS, fleet: str = "2P4D") -> SimulatedPoint:
    moving = MovingSettings(objectives=OBJECTIVES, roles=roles)  # type: ignore[arg-type]
    return Experiment(
        program="disaggregated", fleet=Fleet(fleet, profile="llama-3.1-8b-h100-tp1"), work=workload, moves=moving
    ).point(workload.rate)


@pytest.mark.slow
def test_engines_go_where_the_line_is() -> None:
    fixed, auto = simulated("fixed"), simulated("auto")
    assert fixed.flips == ()
    assert {flip.role for flip in auto.flips} == {"prefill"}
    assert 1 <= len(auto.flips) <= 2
    assert auto.summary.failed == 0
    assert auto.summary.completed == LONG_PROMPTS.requests
    assert fixed.summary.attainment is not None
    assert auto.summary.attainment is not None
    assert auto.summary.attainment > fixed.summary.attainment
    metrics = auto.metrics()
    assert metrics["role_flips"] == len(auto.flips)
    assert metrics["engines_flipped"] == sum(len(flip.engines) for flip in auto.flips)


@pytest.mark.slow
def test_an_overload_of_the_first_seconds_is_acted_on_at_once() -> None:
    """One engine computes a third of what comes; the split that bears it is taken at one go, as by the planner."""
    overload = SyntheticWorkload(rate=45.0, requests=300, input_mean=3000, output_mean=80)
    first, *later = simulated("auto", overload, "1P5D").flips
    assert first.at <= 3.0
    assert first.role == "prefill"
    assert len(first.engines) >= 3
    assert later == []


@pytest.mark.slow
def test_a_load_that_all_engines_bear_changes_no_role() -> None:
    light = SyntheticWorkload(rate=4.0, requests=100, input_mean=500, output_mean=50)
    found = simulated("auto", light)
    assert found.flips == ()
    assert found.summary.attainment == 1.0
    assert "role_flips" not in found.metrics()


def test_roles_that_follow_need_objectives() -> None:
    with pytest.raises(BadRequest, match="--objective-ttft"):
        MovingSettings(roles="auto")


@pytest.mark.slow
def test_objectives_are_an_slo() -> None:
    """The same rule by either name."""
    light = SyntheticWorkload(rate=4.0, requests=20, input_mean=500, output_mean=5)
    found = simulated("fixed", light)
    assert found.summary.request_goodput == pytest.approx(found.summary.request_throughput)
    assert json.loads(json.dumps(found.metrics()))["attainment"] == 1.0
