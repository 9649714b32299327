"""Simulations of programs on fleets of simulated engines, in virtual time, with reports and sweeps."""

from tercet_lab.bench.simulated.experiment import Experiment, Fleet, Planner, Run, moves
from tercet_lab.bench.simulated.recording import Record
from tercet_lab.bench.simulated.scenario import (
    EngineGroup,
    Fault,
    FleetSpec,
    PlannedWorkload,
    SyntheticWorkload,
    parse_fleet,
)
from tercet_lab.bench.simulated.simulation import SimulatedPoint, SimulationReport, point_of, table
from tercet_lab.bench.simulated.virtual_run import Outcome, run_once, run_requests
from tercet_lab.planner_settings import MovingSettings

__all__ = [
    "EngineGroup", "Experiment", "Fault", "Fleet", "FleetSpec", "MovingSettings", "Outcome", "PlannedWorkload",
    "Planner", "Record", "Run", "SimulatedPoint", "SimulationReport", "SyntheticWorkload", "moves", "parse_fleet",
    "point_of", "run_once", "run_requests", "table",
]  # fmt: skip
