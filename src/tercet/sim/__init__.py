"""Simulated engines: the protocol of real ones, in virtual time, at the pace of a measured profile."""

from tercet.sim.clock import run_virtual
from tercet.sim.engine_options import EngineOptions, options_from
from tercet.sim.hosts import Host
from tercet.sim.network import Network
from tercet.sim.sim_engine import SimEngine
from tercet.sim.step_times import Profile, StepModel, load_profile, parse_profile, shipped_profiles

__all__ = [
    "EngineOptions",
    "Host",
    "Network",
    "Profile",
    "SimEngine",
    "StepModel",
    "load_profile",
    "options_from",
    "parse_profile",
    "run_virtual",
    "shipped_profiles",
]
