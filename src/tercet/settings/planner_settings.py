"""How a planner decides, and within which bounds."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tercet.protocol import BadRequest
from tercet.settings.declaration import NotNegative, Seconds, Setting, Settings
from tercet.settings.role_settings import Objectives

PLANNER = "Planner"
NO_PLANNER = "none"
AtLeastTwo = Annotated[int, Meta(ge=2, le=100_000)]
Margin = Annotated[float, Meta(ge=0, le=1)]


PlannedBy = Annotated[
    str,
    Setting(
        "Planner: `simulate`, `none`, `file.py:function` from what was observed to what is wanted, or in simulations "
        "`oracle`, which knows the trace.",
        panel=PLANNER,
    ),
]


class PlannerSettings(Settings, frozen=True):
    """Interval, bounds and margin of a planner; see :class:`~tercet.decisions.planning.Planner`."""

    interval_s: Annotated[
        Seconds, Setting("Seconds from one plan to the next.", unit="seconds", panel=PLANNER)
    ] = msgspec.field(default=15.0, name="planner-interval")  # fmt: skip
    window_s: Annotated[
        Seconds, Setting("Seconds of arrivals that a plan looks back at, at most.", unit="seconds", panel=PLANNER)
    ] = msgspec.field(default=180.0, name="planner-window")  # fmt: skip
    fewest: Annotated[
        AtLeastTwo | None,
        Setting("Fewest engines.", default="as many as there are", panel=PLANNER),
    ] = msgspec.field(default=None, name="planner-min-engines")
    most: Annotated[
        AtLeastTwo | None,
        Setting("Most engines.", default="as many as there are", panel=PLANNER),
    ] = msgspec.field(default=None, name="planner-max-engines")
    margin: Annotated[
        Margin,
        Setting("Share of load beyond the forecast at which a chosen fleet must meet the objectives.", panel=PLANNER),
    ] = msgspec.field(default=0.1, name="planner-margin")
    start_s: Annotated[
        NotNegative,
        Setting("Seconds that an engine takes to start; forecasts reach beyond it.", unit="seconds", panel=PLANNER),
    ] = msgspec.field(default=30, name="planner-start-time")


def require_planner(planner: str, roles: str, objectives: Objectives) -> None:
    """Raises :class:`~tercet.protocol.BadRequest` if a planner lacks objectives, or is not alone."""
    if planner == NO_PLANNER:
        return
    if objectives.ttft is None or objectives.tpot is None:
        raise BadRequest("planner: it needs --objective-ttft and --objective-tpot", "planner")
    if roles == "auto":
        raise BadRequest("planner: it gives engines their roles, and goes without --roles auto", "planner")
