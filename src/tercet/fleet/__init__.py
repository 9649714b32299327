"""The fleet: its engines, their roles, their loads and their prefix caches."""

from tercet.fleet.engine_fleet import EngineFleet
from tercet.fleet.fleet_view import FleetView, Trace
from tercet.fleet.knowledge import FleetKnowledge
from tercet.fleet.members import Member
from tercet.fleet.sequences import Retry, RunningSequence, RunningSequences

__all__ = [
    "EngineFleet", "FleetKnowledge", "FleetView", "Member", "Retry", "RunningSequence", "RunningSequences", "Trace",
]  # fmt: skip
