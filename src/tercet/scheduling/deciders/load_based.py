"""Two engines while one of them has time."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tercet.protocol import Request
from tercet.scheduling.deciders.prefix_based import PrefixBasedDecider
from tercet.scheduling.plugin import Engines


class LoadBasedDecider(PrefixBasedDecider, frozen=True):
    """As :class:`PrefixBasedDecider`, but one engine serves while every prefill engine has a queue.

    A queue is more than ``max_waiting`` waiting requests; an engine of which nothing recent is known has none.
    """

    max_waiting: Annotated[int, Meta(ge=0)] = 5

    def disaggregates(self, request: Request, cached: int, prefill: Engines) -> bool:
        """By what is missing, and by queues."""
        free = ~(prefill.waiting > self.max_waiting)
        return bool(free.any()) and super().disaggregates(request, cached, prefill)
