"""Programs that a planner proposes: simulated in turn with the same fleet and load as the one in use."""

from __future__ import annotations

import pytest

from tercet.decisions.planning import Expected, FleetPlan, ObservedRequest
from tercet.protocol import BadRequest
from tercet.settings.fleet_settings import Objectives
from tercet_lab.sim import EngineOptions
from tercet_planner.forecast import Forecast
from tercet_planner.planner import Evaluate
from tercet_planner.policies import FleetSimulator, NamedProgram, ProgramTrials, parse_program

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
