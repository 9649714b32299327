"""Programs over fleets of simulated engines, in virtual time: describe fleet and traffic, run, report, sweep."""

from tercet.bench.simulated.report import Point, Report, point_of, table
from tercet.bench.simulated.run import Outcome, run_once, run_requests
from tercet.bench.simulated.simulation import Simulation
from tercet.bench.simulated.spec import EngineGroup, Fault, FleetSpec, parse_fleet
from tercet.bench.simulated.workload import SyntheticWorkload

__all__ = [
    "EngineGroup",
    "Fault",
    "FleetSpec",
    "Outcome",
    "Point",
    "Report",
    "Simulation",
    "SyntheticWorkload",
    "parse_fleet",
    "point_of",
    "run_once",
    "run_requests",
    "table",
]
