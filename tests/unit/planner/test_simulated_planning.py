"""A planner in ``tercet sim``: engines that start and stop cost, and the report says what was done; and the loads of
``python -m benchmarks.planner``.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import msgspec
import pytest
from benchmarks.planner import Shape, best_sequence, in_hindsight, load_at, trace, unchanged

from tercet.decisions.planning import Expected, FleetPlan, ObservedRequest
from tercet.protocol import BadRequest
from tercet.settings.fleet_settings import Objectives
from tercet_lab.bench.simulated import Experiment, Fleet, MovingSettings, SyntheticWorkload
from tercet_lab.bench.simulated.simulation import SimulatedPoint
from tercet_lab.planner_settings import PlannerSettings
from tercet_lab.sim import EngineOptions
from tercet_planner.forecast import Forecast
from tercet_planner.planned_figure import plot_planned_run
from tercet_planner.planner import MOST_CLIMB_SIMULATIONS, MOST_SIMULATIONS, Evaluate
from tercet_planner.policies import MOST_REQUESTS, FleetSimulator, NamedProgram, ProgramTrials, parse_program

OBJECTIVES = Objectives(ttft=1.0, tpot=0.025)


def simulated(
    planner: str, workload: SyntheticWorkload, fleet: str = "1P1D", **given: object
) -> tuple[SimulatedPoint, list[str]]:
    moving = MovingSettings(
        objectives=OBJECTIVES,
        planner=planner,
        planning=PlannerSettings(**given),  # type: ignore[arg-type]
    )
    said = list[str]()
    point = Experiment(
        program="disaggregated", fleet=Fleet(fleet, profile="llama-3.1-8b-h100-tp1"), work=workload, moves=moving
    ).point(workload.rate, said.append)
    return point, said


@pytest.mark.slow
def test_engines_are_started_where_they_are_missing_and_cost(tmp_path: Path) -> None:
    heavy = SyntheticWorkload(rate=25.0, requests=1200, input_mean=3000, output_mean=10)
    fixed, _ = simulated("none", heavy)
    found, said = simulated("simulate", heavy, fewest=2, most=6, start_s=5)
    assert found.summary.failed == 0
    assert found.summary.completed == 1200
    assert (found.summary.attainment or 0) > (fixed.summary.attainment or 0)
    metrics = found.metrics()
    assert metrics["engines_started"]
    assert found.planned is not None
    least, most = 2 * 48 / 3600, 6 * 60 / 3600
    assert least < float(metrics["engine_hours"] or 0) < most
    assert any("engine-hours" in line for line in said)
    assert json.loads(json.dumps(metrics))["planner_decisions"] >= 2
    plot_planned_run(found.planned, 0.99, "a run", tmp_path / "run.svg")
    assert "engine-hours" in (tmp_path / "run.svg").read_text()


@pytest.mark.slow
def test_engines_that_are_given_up_finish_what_they_have(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from tercet.decisions.planning import FleetPlan, WantedPlan\n"
        "def wanted(seen):\n    return WantedPlan(FleetPlan(1, 1), 'fewer')\n"
    )
    light = SyntheticWorkload(rate=5.0, requests=100, input_mean=500, output_mean=200)
    found, _ = simulated(f"{file}:wanted", light, fleet="3P3D", fewest=2, interval_s=5.0)
    assert found.summary.failed == 0
    assert found.summary.completed == 100
    assert found.planned is not None
    assert [(each.plan, each.stopped, each.reason) for each in found.planned.changes] == [("1P1D", 4, "fewer")]
    assert found.planned.engine_seconds < 6 * 20


def test_engines_that_never_start_are_in_no_share_and_no_mean(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from tercet.decisions.planning import WantedPlan\n"
        "def same(seen):\n    return WantedPlan(seen.plan, 'as it is')\n"
    )
    load = SyntheticWorkload(rate=20.0, requests=120, input_mean=500, output_mean=50)
    few, many = (simulated(f"{file}:same", load, most=most)[0] for most in (4, 16))
    assert few.planned is not None
    assert many.planned is not None
    assert many.planned.engine_seconds == pytest.approx(few.planned.engine_seconds)
    assert many.busy == pytest.approx(few.busy)
    assert few.imbalance is not None
    assert many.imbalance == few.imbalance


@pytest.mark.parametrize(
    ("fleet", "given", "named"),
    [
        ("both=2", {}, "prefill and decode"),
        ("2P2D", {"fewest": 5, "most": 6}, "planner-min-engines"),
        ("2P2D", {"fewest": 4, "most": 3}, "planner-max-engines"),
    ],
)
def test_bounds_that_do_not_hold_are_refused(fleet: str, given: dict[str, int], named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        simulated("simulate", SyntheticWorkload(rate=1.0, requests=2), fleet, **given)


def test_a_planner_needs_objectives_and_to_be_alone() -> None:
    with pytest.raises(BadRequest, match="--objective-ttft"):
        MovingSettings(planner="simulate")
    with pytest.raises(BadRequest, match="--roles auto"):
        MovingSettings(planner="simulate", roles="auto", objectives=OBJECTIVES)


@pytest.mark.slow
def test_with_scarce_memory_and_lost_transfers_a_planned_run_ends() -> None:
    """Each search simulates a bounded number of fleets with a bounded number of requests, so it is slow at most."""
    fleet = Fleet(
        "2P1D", profile="llama-3.1-8b-h100-tp1", total_blocks=60, transfer_failures=0.1, reserve_wait=0.05,
        schedule="prefill_first",
    )  # fmt: skip
    planning = PlannerSettings(fewest=2, most=5, start_s=5, interval_s=5)
    moving = MovingSettings(objectives=OBJECTIVES, planner="simulate", planning=planning)
    work = SyntheticWorkload(rate=30, requests=200, input_mean=60, output_mean=120, output_dev=60)
    point = Experiment(program="auto", fleet=fleet, work=work, moves=moving).point(30.0)
    assert point.summary.completed + point.summary.failed == 200
    planned = point.planned
    assert planned is not None
    assert 0 < planned.simulations <= planned.decisions * (2 + MOST_SIMULATIONS + MOST_CLIMB_SIMULATIONS)
    assert 0 < planned.simulated_requests <= planned.simulations * MOST_REQUESTS


@pytest.mark.slow
def test_all_plans_have_what_they_expected_and_what_came() -> None:
    planning = PlannerSettings(fewest=2, most=3, start_s=5, interval_s=5.0)
    moving = MovingSettings(objectives=OBJECTIVES, planner="simulate", planning=planning)
    heavy = SyntheticWorkload(rate=12.0, requests=700, input_mean=3000, output_mean=10)
    fleet = Fleet("1P1D", profile="llama-3.1-8b-h100-tp1")
    run = Experiment(program="disaggregated", fleet=fleet, work=heavy, moves=moving).run()
    assert run.point is not None
    assert run.point.planned is not None
    plans = list(run.plans.rows())
    assert run.point.planned.decisions <= len(plans), "the guard's changes come too"
    told = [row for row in plans if row["expected"] is not None]
    assert len(told) > 5
    assert all(0 <= row["expected"] <= 1 for row in told)
    ended = [(row["ended"], row["met_slo"]) for row in run.requests.rows()]
    compared = 0
    by_plan = [row for row in plans if not row["reason"].startswith("guard: ")]
    for row, following in itertools.pairwise(by_plan):
        since = [met for at, met in ended if row["at"] < at <= following["at"]]
        if row["came"] is not None and since and row["plan"] == following["plan"]:
            assert row["came"] == pytest.approx(sum(since) / len(since), abs=1 / len(since))
            compared += 1
    assert compared > 5


# Programs that a planner proposes: simulated in turn with the same fleet and load as the one in use.

USED, PLAN = NamedProgram("disaggregated", {}), FleetPlan(2, 2)
LOAD = Forecast(4.0, tuple(ObservedRequest(each / 4, 500, 20, True) for each in range(40)), "made")
SHARES = {"disaggregated": 0.8, "data_parallel": 0.81, "balanced": 0.95}


def known(named: NamedProgram) -> Evaluate:
    return lambda plan, forecast: Expected(SHARES[named.program], 1.0, forecast.rate)


def test_a_program_that_gains_is_proposed_when_it_is_its_turn() -> None:
    trials = ProgramTrials(("data_parallel", "balanced", "disaggregated"), known)
    found = [trials.look(USED, PLAN, LOAD) for _ in range(4)]
    assert [each and str(each[0]) for each in found] == [None, "tercet program balanced", None, None]
    assert ProgramTrials((), known).look(USED, PLAN, LOAD) is None
    assert ProgramTrials(("balanced",), known).look(USED, PLAN, Forecast(0.0, (), "none")) is None


def test_parameters_are_those_of_the_program() -> None:
    assert str(parse_program("disaggregated,min_send=64")) == "tercet program disaggregated --program-arg min_send=64"
    for text in ("disaggregated,64", "disaggregated,min_mood=1", "nothing"):
        with pytest.raises(BadRequest):
            parse_program(text)


@pytest.mark.slow
def test_programs_are_simulated_with_the_fleet_that_is_there() -> None:
    objectives = Objectives(ttft=1.0, tpot=0.025)

    def simulator(named: NamedProgram) -> Evaluate:
        return FleetSimulator(named.program, "llama-3.1-8b-h100-tp1", EngineOptions(), objectives, named.args)

    for text in ("disaggregated", "data_parallel", "auto"):
        assert simulator(parse_program(text))(PLAN, LOAD).attainment > 0.9
    assert ProgramTrials(("data_parallel",), simulator).look(USED, PLAN, LOAD) is None


@pytest.mark.parametrize("shape", ["flip", "day", "bursts", "tenants", "steady"])
def test_a_trace_has_the_load_that_it_is_made_of(shape: Shape) -> None:
    seconds, rate = 400.0, 10.0
    lines = list(trace(shape, seconds, rate, seed=1))
    assert lines == list(trace(shape, seconds, rate, seed=1))
    times = [line["timestamp"] / 1e3 for line in lines]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < seconds
    expected = sum(load_at(shape, at / 10, seconds, rate).rate / 10 for at in range(int(seconds * 10)))
    assert len(lines) == pytest.approx(expected, rel=0.1)
    blocks = [block for line in lines for block in line["hash_ids"]]
    assert len(blocks) == len(set(blocks))
    for line in lines[::50]:
        at = line["timestamp"] / 1e3
        assert line["input_length"] == pytest.approx(load_at(shape, at, seconds, rate).prompt, rel=1.2)


@pytest.mark.slow
def test_hindsight_is_at_least_as_good_as_each_fixed_fleet(tmp_path: Path) -> None:
    seconds = 120.0
    lines = list(trace("flip", seconds, 2, seed=0))
    file = tmp_path / "trace.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    objectives = Objectives(ttft=0.4, tpot=0.02)
    engines = {"1P1D": 2, "2P1D": 3, "1P2D": 3}
    fixed = {fleet: unchanged(file, fleet, "llama-3.1-8b-h100-tp1", objectives) for fleet in engines}
    for each in fixed.values():
        assert sum(each.met) == pytest.approx(each.row.met * len(lines))
        assert len(each.met) == 2
    best = in_hindsight(fixed, len(lines), start_s=30.0)
    assert 0 < best.met <= 1
    for fleet, each in fixed.items():
        assert best.per_hour >= sum(each.met) / (engines[fleet] * seconds / 3600) * (1 - 1e-9)


# The best sequence of fleets in hindsight, against all sequences.

PLANS = [FleetPlan(1, 1), FleetPlan(2, 1), FleetPlan(3, 2)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("start_s", [0.0, 20.0, 300.0])
def test_no_sequence_serves_more_for_an_engine_hour(seed: int, start_s: float) -> None:
    chance = random.Random(seed)
    met = {plan: [chance.uniform(0, 40) * plan.engines**0.5 for _ in range(5)] for plan in PLANS}
    found = best_sequence(met, 30.0, start_s)

    def per_hour(fleets: tuple[FleetPlan, ...]) -> float:
        starts = sum(max(0, after.engines - before.engines) for before, after in itertools.pairwise(fleets))
        hours = (sum(each.engines for each in fleets) * 30.0 + starts * start_s) / 3600
        return sum(met[each][when] for when, each in enumerate(fleets)) / hours

    assert found.per_hour == pytest.approx(max(map(per_hour, itertools.product(PLANS, repeat=5))))
    assert found.per_hour == pytest.approx(per_hour(found.fleets))


def test_engines_that_take_long_to_start_are_kept_through_a_lull() -> None:
    small, large = FleetPlan(1, 1), FleetPlan(4, 2)
    met = {small: [2.0, 10.0, 2.0], large: [90.0, 10.0, 90.0]}
    assert best_sequence(met, 30.0, 0.0).fleets == (large, small, large)
    assert best_sequence(met, 30.0, 120.0).fleets == (large, large, large)
    assert best_sequence(met, 30.0, 120.0).changes == 0
