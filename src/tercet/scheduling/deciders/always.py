"""Two engines, always."""

from __future__ import annotations

from tercet.protocol import Request
from tercet.scheduling.plugin import Decider, Engines


class AlwaysDisaggregate(Decider, frozen=True):
    """Every request is prefilled on another engine."""

    def disaggregates(self, request: Request, cached: int, prefill: Engines) -> bool:
        """Yes."""
        return True
