"""The laboratory for scripts: programs on simulated engines, in virtual time. Part of the distribution ``tercet-lab``.

These are the parts of ``tercet sim``. Their names stay; their parameters may change until ``docs/stability.md`` names
them.
"""

from tercet_lab.bench.results import Slo
from tercet_lab.bench.simulated import (
    MovingSettings,
    PlannedWorkload,
    SimulatedPoint,
    Simulation,
    SimulationReport,
    SyntheticWorkload,
    parse_fleet,
    run_once,
)
from tercet_lab.sim import EngineOptions, Network, Profile, SimEngine, load_profile, run_virtual, shipped_profiles

__all__ = [
    "EngineOptions",
    "MovingSettings",
    "Network",
    "PlannedWorkload",
    "Profile",
    "SimEngine",
    "SimulatedPoint",
    "Simulation",
    "SimulationReport",
    "Slo",
    "SyntheticWorkload",
    "load_profile",
    "parse_fleet",
    "run_once",
    "run_virtual",
    "shipped_profiles",
]
