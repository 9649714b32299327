"""What a plugin is: a frozen record of its parameters with one method.

In a file they are written in camel case (``block_size`` is ``blockSize``); unknown ones are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from tercet.protocol import Request
from tercet.scheduling.decision import Decision
from tercet.scheduling.engine_columns import Booleans, Engines, Floats, Integers

Scores = Floats | Sequence[float]


class Plugin(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Base of all plugins; its fields are the parameters."""

    def picked(self, decision: Decision, row: int) -> None:
        """The decision fell on the engine in ``row``. For plugins that tell :class:`Knowledge` what happened."""


class Filter(Plugin, frozen=True, kw_only=True):
    """Leaves out engines.

    If a filter that is not ``strict`` leaves out all, it is passed over; a strict one then fails the pick.
    """

    strict: bool = True

    def keep(self, decision: Decision, engines: Engines) -> Booleans | Sequence[bool]:
        """For each engine, whether it stays."""
        raise NotImplementedError(f"{type(self).__name__} has no keep()")


class Scorer(Plugin, frozen=True):
    """Gives each engine a score from 0 to 1; the sum of scores times weights is what pickers see."""

    runs_last: ClassVar[bool] = False

    def score(self, decision: Decision, engines: Engines) -> Scores:
        """A score for each engine, 1 for the best. What is outside of 0 to 1 is cut off there; NaN counts as 0."""
        raise NotImplementedError(f"{type(self).__name__} has no score()")


class Picker(Plugin, frozen=True):
    """Picks one of the engines that filters left, by their scores."""

    def pick(self, decision: Decision, engines: Engines, scores: Floats) -> int:
        """The index of the engine to take; there is at least one."""
        raise NotImplementedError(f"{type(self).__name__} has no pick()")


class Decider(Plugin, frozen=True):
    """Decides whether a second engine shall prefill for the decode engine that was picked."""

    def disaggregates(self, request: Request, cached: int, prefill: Engines) -> bool:
        """``cached`` tokens of the prompt are believed to be on the decode engine; ``prefill`` could compute the rest.

        ``prefill`` leaves the decode engine out, and is never empty.
        """
        raise NotImplementedError(f"{type(self).__name__} has no disaggregates()")


__all__ = ["Booleans", "Decider", "Decision", "Engines", "Filter", "Floats", "Integers", "Picker", "Plugin", "Scorer"]
