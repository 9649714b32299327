"""Moves of running sequences between engines: the move itself, and the policies that propose moves."""

from tercet.decisions.migration.live import Movable, Stage, migrate
from tercet.decisions.migration.policies import (
    CountedMove,
    LoadedEngine,
    MovesUnderWay,
    Policy,
    Rescheduling,
    Selection,
    SequenceView,
    Wanted,
    balance,
    best_fit,
    consolidate,
    defragment,
    drain,
    failover,
    least_loaded,
    mitigate,
    move,
    policies_of,
    prefill_to_decode,
)

__all__ = [
    "CountedMove", "LoadedEngine", "Movable", "MovesUnderWay", "Policy", "Rescheduling", "Selection", "SequenceView",
    "Stage", "Wanted", "balance", "best_fit", "consolidate", "defragment", "drain", "failover", "least_loaded",
    "migrate", "mitigate", "move", "policies_of", "prefill_to_decode",
]  # fmt: skip
