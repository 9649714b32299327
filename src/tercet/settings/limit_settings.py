"""Settings of a router's limits: on running and waiting work, on one request, and on one client."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tercet.settings.declaration import AtLeastOne, NotNegative, Seconds, Setting, Settings
from tercet.settings.panels import LIMITS


class Limits(Settings, frozen=True):
    """Limits of the running work of one process. A request is admitted while every count is below its limit.

    ``in_flight`` counts sequences; a request has one for each prompt and choice, and at least one. ``tokens`` counts
    the prompt tokens of sequences on engines, separately for each engine. The limits ``per_engine`` are multiplied by
    the number of decode engines that can be picked. ``sequences``, ``at_once`` and ``items`` limit one request and
    ``long_queued`` limits one client: they do not make a fleet full.
    """

    in_flight: Annotated[
        AtLeastOne | None,
        Setting(
            "Most running sequences; further requests wait. A request has one sequence for each prompt and choice.",
            default="no limit",
            panel=LIMITS,
        ),
    ] = msgspec.field(default=None, name="max-in-flight")
    in_flight_per_engine: Annotated[
        AtLeastOne | None,
        Setting(
            "Most running sequences for each decode engine; further requests wait.", default="no limit", panel=LIMITS
        ),
    ] = msgspec.field(default=None, name="max-in-flight-per-engine")
    tokens: Annotated[
        AtLeastOne | None,
        Setting("Number of prompt tokens on engines at which requests wait.", default="no limit", panel=LIMITS),
    ] = msgspec.field(default=None, name="max-in-flight-tokens")
    tokens_per_engine: Annotated[
        AtLeastOne | None,
        Setting(
            "Number of prompt tokens per decode engine at which requests wait.",
            default="no limit",
            panel=LIMITS,
        ),
    ] = msgspec.field(default=None, name="max-in-flight-tokens-per-engine")
    queued: Annotated[
        NotNegative, Setting("Most requests that may wait; further ones get 429.", panel=LIMITS)
    ] = msgspec.field(default=1000, name="max-queued")  # fmt: skip
    queue_timeout_s: Annotated[
        Seconds, Setting("Longest wait of a request; after it the request gets 429.", unit="seconds", panel=LIMITS)
    ] = msgspec.field(default=30.0, name="queue-timeout")

    sequences: Annotated[
        AtLeastOne,
        Setting(
            "Most sequences of one request (prompts times `n`); a request with more gets 400.",
            panel=LIMITS,
            in_file=True,
        ),
    ] = msgspec.field(default=512, name="max-sequences")
    at_once: Annotated[
        AtLeastOne,
        Setting(
            "Most sequences of one request that run at once; the others start when these end.",
            panel=LIMITS,
            in_file=True,
        ),
    ] = msgspec.field(default=128, name="max-sequences-at-once")

    items: Annotated[
        AtLeastOne,
        Setting(
            "Most lists and objects in a request's body, such as messages and tools; a request with more gets 400.",
            panel=LIMITS,
            in_file=True,
        ),
    ] = msgspec.field(default=4096, name="max-request-items")
    long_queued: Annotated[
        NotNegative,
        Setting(
            "Most requests with long bodies of one client that wait to be prepared; further ones get 429.",
            panel=LIMITS,
            in_file=True,
        ),
    ] = msgspec.field(default=64, name="max-long-queued")

    @property
    def any(self) -> bool:
        """True if a limit of the fleet is set."""
        return any((self.in_flight, self.in_flight_per_engine, self.tokens, self.tokens_per_engine))
