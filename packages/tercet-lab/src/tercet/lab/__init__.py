"""The laboratory for scripts and notebooks: programs on simulated engines, in virtual time.

Part of the distribution ``tercet-lab``; ``docs/lab.md`` shows its use, ``docs/stability.md`` says which names stay. All
times are in seconds. Invalid arguments raise :class:`~tercet.protocol.BadRequest`, which names the argument.
"""

from tercet_lab import plot
from tercet_lab.advice import Advice, advise
from tercet_lab.bench.simulated import (
    EngineGroup,
    Experiment,
    Fault,
    Fleet,
    FleetSpec,
    MovingSettings,
    PlannedWorkload,
    Planner,
    Record,
    Run,
    SimulatedPoint,
    SyntheticWorkload,
    parse_fleet,
    run_once,
)
from tercet_lab.bench.simulated import moves as Moves
from tercet_lab.bench.simulated.capacity import Capacity
from tercet_lab.bench.simulated.grid import Grid
from tercet_lab.bench.simulated.run_metrics import METRICS
from tercet_lab.bench.simulated.works import Fixed, Lognormal, Normal, Poisson, Rows, Sessions, Trace, Workload
from tercet_lab.interface import max_rate, simulate, stream, sweep
from tercet_lab.run_files import load
from tercet_lab.sim import EngineOptions, Network, Profile, SimEngine, load_profile, run_virtual, shipped_profiles
from tercet_lab.slo import Slo
from tercet_lab.tables import Requests, Table

__all__ = [
    "METRICS", "Advice", "Capacity", "EngineGroup", "EngineOptions", "Experiment", "Fault", "Fixed", "Fleet",
    "FleetSpec", "Grid", "Lognormal", "Moves", "MovingSettings", "Network", "Normal", "PlannedWorkload", "Planner",
    "Poisson", "Profile", "Record", "Requests", "Rows", "Run", "Sessions", "SimEngine", "SimulatedPoint", "Slo",
    "SyntheticWorkload", "Table", "Trace", "Workload", "advise", "load", "load_profile", "max_rate", "parse_fleet",
    "plot", "run_once", "run_virtual", "shipped_profiles", "simulate", "stream", "sweep",
]  # fmt: skip
