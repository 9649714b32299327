"""Settings of agents' sessions: which engine serves their turns, and how their KV is kept between two turns."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tercet.settings.declaration import AtLeastOne, Seconds, Setting, Settings
from tercet.settings.panels import PLACEMENT

Share = Annotated[float, Meta(ge=0, le=1)]


class SessionSettings(Settings, frozen=True):
    """Settings of a router for the turns of one session."""

    together: Annotated[
        Literal["on", "off"],
        Setting("Send all turns of a session to one engine.", panel=PLACEMENT),
    ] = msgspec.field(default="off", name="sessions")
    keep: Annotated[
        Literal["none", "tools", "all"],
        Setting(
            "Sessions whose KV is pinned between two turns; `tools`: those that wait for a tool's result.",
            panel=PLACEMENT,
        ),
    ] = msgspec.field(default="tools", name="session-keep")
    keep_s: Annotated[
        Seconds, Setting("Longest time that a session's KV is pinned.", unit="seconds", panel=PLACEMENT, in_file=True)
    ] = msgspec.field(default=30.0, name="session-keep-for")  # fmt: skip
    keep_share: Annotated[
        Share,
        Setting("Share of an engine's KV cache, from 0 to 1, that all sessions together may pin.", panel=PLACEMENT,
                in_file=True),
    ] = msgspec.field(default=0.3, name="session-keep-share")  # fmt: skip
    give_up_at: Annotated[
        Share,
        Setting(
            "KV usage of an engine, from 0 to 1, at or above which pinned KV is released; or while requests wait.",
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
        Setting("Most sessions that a router process remembers; the least recently used are forgotten.",
                panel=PLACEMENT, in_file=True),
    ] = msgspec.field(default=10_000, name="max-sessions-remembered")  # fmt: skip
    tokens: Annotated[
        AtLeastOne,
        Setting(
            "Most tokens that a router process remembers for all sessions, 4 bytes each; a session without remembered "
            "tokens is recomputed when its engine is drained.",
            panel=PLACEMENT,
            in_file=True,
        ),
    ] = msgspec.field(default=32 * 1024 * 1024, name="max-session-tokens")

    @property
    def on(self) -> bool:
        """True if all turns of a session go to one engine."""
        return self.together == "on"
