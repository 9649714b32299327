"""Moves of running sequences between engines: the move itself, and the policies that propose moves."""

from tercet.decisions.migration.limits import CountedMove, MovesUnderWay
from tercet.decisions.migration.live import Movable, Stage, migrate
from tercet.decisions.migration.loaded_engines import LoadedEngine, Policy, Wanted, best_fit, least_loaded, move
from tercet.decisions.migration.packing import consolidate, defragment, mitigate
from tercet.decisions.migration.policies import balance, drain, failover, prefill_to_decode
from tercet.decisions.migration.policy_names import policies_of
from tercet.decisions.migration.rescheduling import Rescheduling
from tercet.decisions.migration.selection import Selection, SequenceView

__all__ = [
    "CountedMove",
    "LoadedEngine",
    "Movable",
    "MovesUnderWay",
    "Policy",
    "Rescheduling",
    "Selection",
    "SequenceView",
    "Stage",
    "Wanted",
    "balance",
    "best_fit",
    "consolidate",
    "defragment",
    "drain",
    "failover",
    "least_loaded",
    "migrate",
    "mitigate",
    "move",
    "policies_of",
    "prefill_to_decode",
]
