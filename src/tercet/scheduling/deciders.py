"""Deciders: whether a second engine shall prefill."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tercet.protocol import Request
from tercet.scheduling.plugin import Decider, Engines


class AlwaysDisaggregate(Decider, frozen=True):
    """Every request is prefilled on another engine."""

    def disaggregates(self, request: Request, cached: int, prefill: Engines) -> bool:
        return True


class PrefixBasedDecider(Decider, frozen=True):
    """Another engine prefills if at least ``non_cached_tokens`` are missing on the decode engine.

    Prompts shorter than ``prompt_tokens`` stay on one engine, whatever is cached. 0 means no limit.
    """

    non_cached_tokens: Annotated[int, Meta(ge=0)] = 0
    prompt_tokens: Annotated[int, Meta(ge=0)] = 0

    def disaggregates(self, request: Request, cached: int, prefill: Engines) -> bool:
        return request.num_tokens >= self.prompt_tokens and request.num_tokens - cached >= self.non_cached_tokens


class LoadBasedDecider(PrefixBasedDecider, frozen=True):
    """As :class:`PrefixBasedDecider`, but one engine serves while every prefill engine has a queue.

    A queue is more than ``max_waiting`` waiting requests; an engine of which nothing recent is known has none.
    """

    max_waiting: Annotated[int, Meta(ge=0)] = 5

    def disaggregates(self, request: Request, cached: int, prefill: Engines) -> bool:
        free = ~(prefill.waiting > self.max_waiting)
        return bool(free.any()) and super().disaggregates(request, cached, prefill)
