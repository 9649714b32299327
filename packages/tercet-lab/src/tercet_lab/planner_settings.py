"""Settings of simulated fleets that are those of routers and planners, with their bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from tercet.protocol import BadRequest
from tercet.settings import MoveSettings, RescheduleSettings
from tercet.settings.declaration import NotNegative, Seconds, Setting, Settings
from tercet.settings.fleet_settings import (
    DEFAULT_CLASS,
    OBJECTIVES,
    Objectives,
    RolesBy,
    SessionSettings,
    require_objectives,
)

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
        AtLeastTwo | None, Setting("Fewest engines that a plan may have.", default="the current number", panel=PLANNER)
    ] = msgspec.field(default=None, name="planner-min-engines")
    most: Annotated[
        AtLeastTwo | None, Setting("Most engines that a plan may have.", default="the current number", panel=PLANNER)
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


class MovingSettings(Settings, frozen=True):
    """The settings of ``tercet router`` for moves, sessions, objectives and roles, and of ``tercet planner``."""

    moves: MoveSettings = MoveSettings()
    reschedule: RescheduleSettings = RescheduleSettings()
    objectives: Objectives = Objectives()
    sessions: SessionSettings = SessionSettings()
    roles: RolesBy = "fixed"
    planner: PlannedBy = NO_PLANNER
    planning: PlannerSettings = PlannerSettings()
    class_traffic: Annotated[
        Mapping[str, str],
        Setting(
            "Frequency of a class among simulated requests: NAME=WEIGHT; `default` is requests without a class. "
            "Repeatable",
            panel=OBJECTIVES,
        ),
    ] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        weights_of(self.class_traffic, self.objectives)
        require_objectives(self.roles, self.objectives)
        require_planner(self.planner, self.planning, self.roles, self.objectives)


def weights_of(traffic: Mapping[str, str], objectives: Objectives) -> dict[str, float]:
    """Return the weight of each class. Raise :class:`~tercet.protocol.BadRequest` for an unknown or missing class."""
    known, flag = [DEFAULT_CLASS, *(each.name for each in objectives.classes)], "class-traffic"
    found = dict[str, float]()
    for name, given in traffic.items():
        if name not in known:
            raise BadRequest(
                f"{flag}: {name} is not a class of the configuration; choose from {', '.join(known)}", flag
            )
        try:
            found[name] = float(given)
        except ValueError:
            found[name] = 0.0
        if not 0 < found[name] < math.inf:
            raise BadRequest(f"{flag}: the weight of {name} is {given!r}, and must be a positive number", flag)
    missing = [each.name for each in objectives.classes if each.name not in found]
    if missing:
        raise BadRequest(f"{flag}: the weight of class {missing[0]} is missing; give it", flag)
    return found
