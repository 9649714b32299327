"""Sessions of agents: whether their turns are kept together, and what happens to their KV between two turns."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tercet.settings.declaration import AtLeastOne, Seconds, Setting, Settings
from tercet.settings.panels import PLACEMENT

Share = Annotated[float, Meta(ge=0, le=1)]


class SessionSettings(Settings, frozen=True):
    """How a router serves the turns of one session."""

    together: Annotated[
        Literal["on", "off"],
        Setting("Turns of a session go to one engine.", panel=PLACEMENT),
    ] = msgspec.field(default="off", name="sessions")
    keep: Annotated[
        Literal["none", "tools", "all"],
        Setting(
            "Sessions whose KV is pinned in pauses.",
            panel=PLACEMENT,
        ),
    ] = msgspec.field(default="tools", name="session-keep")
    keep_s: Annotated[
        Seconds, Setting("Longest time that it is pinned.", unit="seconds", panel=PLACEMENT, in_file=True)
    ] = msgspec.field(default=30.0, name="session-keep-for")  # fmt: skip
    keep_share: Annotated[
        Share, Setting("Share of an engine's KV cache that sessions may pin together.", panel=PLACEMENT, in_file=True)
    ] = msgspec.field(default=0.3, name="session-keep-share")  # fmt: skip
    give_up_at: Annotated[
        Share,
        Setting(
            "KV usage of an engine from which on pinned KV is given up there; so it is while requests wait.",
            panel=PLACEMENT,
            in_file=True,
        ),
    ] = msgspec.field(default=0.9, name="session-give-up-at")
    ttl_s: Annotated[
        Seconds,
        Setting(
            "Time without a turn after which a session is forgotten.", unit="seconds", panel=PLACEMENT, in_file=True
        ),
    ] = msgspec.field(default=3600.0, name="session-ttl")
    most: Annotated[
        AtLeastOne,
        Setting("Sessions that a router process remembers; those of the oldest turns are forgotten.", panel=PLACEMENT,
                in_file=True),
    ] = msgspec.field(default=10_000, name="max-sessions-remembered")  # fmt: skip
    tokens: Annotated[
        AtLeastOne,
        Setting(
            "Tokens of all sessions that a router process remembers, 4 bytes each; sessions beyond are recomputed "
            "where their engine is drained.",
            panel=PLACEMENT,
            in_file=True,
        ),
    ] = msgspec.field(default=32 * 1024 * 1024, name="max-session-tokens")

    @property
    def on(self) -> bool:
        """Whether turns are kept together."""
        return self.together == "on"
