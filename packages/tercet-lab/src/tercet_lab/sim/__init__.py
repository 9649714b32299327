"""Simulated engines: the protocol of real engines, in virtual time, with step times from a measured profile."""

from tercet_lab.sim.clock import run_virtual
from tercet_lab.sim.engine_options import EngineOptions, options_from
from tercet_lab.sim.network import Network
from tercet_lab.sim.sim_engine import SimEngine
from tercet_lab.sim.step_times import Host, Profile, StepModel, load_profile, parse_profile, shipped_profiles

__all__ = [
    "EngineOptions", "Host", "Network", "Profile", "SimEngine", "StepModel", "load_profile", "options_from",
    "parse_profile", "run_virtual", "shipped_profiles",
]  # fmt: skip
