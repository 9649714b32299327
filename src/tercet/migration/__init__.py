"""Moves of running sequences between engines: how one is made, and which are worth making."""

from tercet.migration.limits import MovesUnderWay, Proposal
from tercet.migration.live import Movable, Stage, migrate
from tercet.migration.policies import LoadedEngine, Policy, Wanted, balance, drain, prefill_to_decode
from tercet.migration.selection import Selection, SequenceView

__all__ = [
    "LoadedEngine",
    "Movable",
    "MovesUnderWay",
    "Policy",
    "Proposal",
    "Selection",
    "SequenceView",
    "Stage",
    "Wanted",
    "balance",
    "drain",
    "migrate",
    "prefill_to_decode",
]
