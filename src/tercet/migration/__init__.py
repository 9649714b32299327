"""Moves of running sequences between engines: how one is made, and which are worth making."""

from tercet.migration.limits import MovesUnderWay, Proposal
from tercet.migration.live import Movable, Stage, migrate

__all__ = ["Movable", "MovesUnderWay", "Proposal", "Stage", "migrate"]
