"""Settings of a planner's decisions, with their bounds."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tercet.protocol import BadRequest
from tercet.settings.declaration import NotNegative, Seconds, Setting, Settings
from tercet.settings.fleet_settings import Objectives

PLANNER = "Planner"
NO_PLANNER = "none"
AtLeastTwo = Annotated[int, Meta(ge=2, le=100_000)]
Margin = Annotated[float, Meta(ge=0, le=1)]


PlannedBy = Annotated[
    str,
    Setting(
        "Planner: `simulate`, `none`, your own `file.py:function` from observed to wanted state, or in simulations "
        "`oracle`, which knows the trace.",
        panel=PLANNER,
    ),
]


class PlannerSettings(Settings, frozen=True):
    """Interval, bounds and margin of a planner; see :class:`~tercet.decisions.planning.Planner`."""

    interval_s: Annotated[
        Seconds, Setting("Interval between two plans.", unit="seconds", panel=PLANNER)
    ] = msgspec.field(default=15.0, name="planner-interval")  # fmt: skip
    # Longest past period whose arrivals a plan uses.
    window_s: Seconds = 180.0
    fewest: Annotated[
        AtLeastTwo | None,
        Setting("Fewest engines that a plan may have.", default="the current number", panel=PLANNER),
    ] = msgspec.field(default=None, name="planner-min-engines")
    most: Annotated[
        AtLeastTwo | None,
        Setting("Most engines that a plan may have.", default="the current number", panel=PLANNER),
    ] = msgspec.field(default=None, name="planner-max-engines")
    margin: Annotated[
        Margin,
        Setting(
            "Extra load, as a share of the forecast, at which a chosen fleet must still meet the objectives.",
            panel=PLANNER,
        ),
    ] = msgspec.field(default=0.1, name="planner-margin")
    start_s: Annotated[
        NotNegative,
        Setting("Time that an engine takes to start; forecasts reach beyond it.", unit="seconds", panel=PLANNER),
    ] = msgspec.field(default=30, name="planner-start-time")


def require_planner(planner: str, planning: PlannerSettings, roles: str, objectives: Objectives) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if a planner is missing or lacks what it needs.

    It needs objectives, and a router that does not change roles too. Its settings have no effect without it.
    """
    if planner == NO_PLANNER:
        for each in msgspec.structs.fields(PlannerSettings):
            if getattr(planning, each.name) != each.default:
                raise BadRequest(f"{each.encode_name}: has no effect without --planner", each.encode_name)
        return
    if objectives.ttft is None or objectives.tpot is None:
        raise BadRequest("planner: needs objectives; set --objective-ttft and --objective-tpot", "planner")
    if roles == "auto":
        raise BadRequest("planner: changes roles itself; remove --roles auto", "planner")
