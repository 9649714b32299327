"""Deciders: whether a second engine is worth it."""

from tercet.scheduling.deciders.always import AlwaysDisaggregate
from tercet.scheduling.deciders.load_based import LoadBasedDecider
from tercet.scheduling.deciders.prefix_based import PrefixBasedDecider

__all__ = ["AlwaysDisaggregate", "LoadBasedDecider", "PrefixBasedDecider"]
