"""Two engines when much is to be computed."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tercet.protocol import Request
from tercet.scheduling.plugin import Decider, Engines


class PrefixBasedDecider(Decider, frozen=True):
    """Another engine prefills if at least ``non_cached_tokens`` are missing on the decode engine.

    Prompts shorter than ``prompt_tokens`` stay on one engine, whatever is cached. 0 means no limit.
    """

    non_cached_tokens: Annotated[int, Meta(ge=0)] = 0
    prompt_tokens: Annotated[int, Meta(ge=0)] = 0

    def disaggregates(self, request: Request, cached: int, prefill: Engines) -> bool:
        """By what is missing."""
        return request.num_tokens >= self.prompt_tokens and request.num_tokens - cached >= self.non_cached_tokens
