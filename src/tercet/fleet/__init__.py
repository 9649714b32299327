"""The fleet: its engines, their roles, their loads and their prefix caches."""

from tercet.fleet.engine_fleet import EngineFleet, FleetView, Member
from tercet.fleet.knowledge import FleetKnowledge
from tercet.fleet.sequences import Retry, RunningSequence, RunningSequences
from tercet.fleet.trace import Trace

__all__ = [
    "EngineFleet", "FleetKnowledge", "FleetView", "Member", "Retry", "RunningSequence",
    "RunningSequences", "Trace",
]  # fmt: skip
