"""What requests should get, and who gives engines their roles: operators or the router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tercet.protocol import BadRequest
from tercet.settings.declaration import Seconds, Setting, Settings, key_values

OBJECTIVES = "Objectives and roles"
Share = Annotated[float, Meta(gt=0, le=1)]
RolesBy = Annotated[
    Literal["auto", "fixed"],
    Setting(
        "Engines' roles prefill and decode: `fixed` as given, or `auto`: the router changes them when their load does. "
        "It needs both objectives.",
        panel=OBJECTIVES,
    ),
]


DEFAULT_CLASS = "default"
MOST_CLASSES = 16


class ObjectiveClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The objectives of requests whose header says this ``name``: limits in seconds, None means no limit."""

    name: Annotated[str, Meta(pattern=r"^[\w.-]+$", max_length=64)]
    ttft: Seconds | None = None
    tpot: Seconds | None = None
    share: Share = 0.99

    def __post_init__(self) -> None:
        if self.ttft is None and self.tpot is None:
            raise BadRequest(f"objective-class: {self.name} has neither ttft nor tpot; give it one", "objective-class")


def class_fields(given: Any, _index: int) -> Any:
    """An :class:`ObjectiveClass` as a mapping, out of one or of ``NAME[,ttft=S][,tpot=S][,share=S]``.

    Raises :class:`~tercet.protocol.BadRequest`.
    """
    if not isinstance(given, str):
        return given
    name, *rest = given.split(",")
    return {"name": name, **{key: _number(value) for key, value in key_values(rest, given).items()}}


def _number(given: str) -> float | str:
    try:
        return float(given)
    except ValueError:
        return given  # refused with its field's name


class Objectives(Settings, frozen=True):
    """What a share of the requests must get: limits of their latencies, in seconds; None means no limit.

    Requests whose ``header`` names one of the ``classes`` have that one's instead.
    :func:`tercet.decisions.objectives.meets` is the rule.
    """

    ttft: Annotated[
        Seconds | None,
        Setting("Objective: longest time to the first token.", unit="seconds", default="none", panel=OBJECTIVES),
    ] = msgspec.field(default=None, name="objective-ttft")
    tpot: Annotated[
        Seconds | None,
        Setting("Objective: longest mean time per further token.", unit="seconds", default="none", panel=OBJECTIVES),
    ] = msgspec.field(default=None, name="objective-tpot")
    share: Annotated[
        Share, Setting("Share of the requests that must meet the objectives.", panel=OBJECTIVES)
    ] = msgspec.field(default=0.99, name="objective-share")  # fmt: skip
    classes: Annotated[
        tuple[ObjectiveClass, ...],
        Setting(
            "Objectives of a class of requests: ttft, tpot, share. Repeatable.",
            metavar="NAME,ttft=S", read=class_fields, panel=OBJECTIVES,
        ),
    ] = msgspec.field(default=(), name="objective-class")  # fmt: skip
    header: Annotated[
        Annotated[str, Meta(pattern=r"^[a-z0-9-]+$", max_length=64)],
        Setting("The header that names a request's class, in lower case.", in_file=True, panel=OBJECTIVES),
    ] = msgspec.field(default="x-objective-class", name="objective-header")

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [DEFAULT_CLASS, *(each.name for each in self.classes)]
        if len({*names}) < len(names):
            raise BadRequest(
                f"objective-class: each needs another name, and none is {DEFAULT_CLASS}, which is that of requests "
                "without a class",
                "objective-class",
            )
        if len(self.classes) > MOST_CLASSES:
            raise BadRequest(f"objective-class: at most {MOST_CLASSES}, each is a series", "objective-class")

    def class_of(self, headers: Mapping[str, str]) -> ObjectiveClass | None:
        """The class that a request's headers name; None if they name none, or an unknown one."""
        named = headers.get(self.header) if self.classes else None
        return next((each for each in self.classes if each.name == named), None)

    @property
    def any(self) -> bool:
        """Whether there is a limit."""
        return self.ttft is not None or self.tpot is not None


def require_objectives(roles: str, objectives: Objectives) -> None:
    """Raises :class:`~tercet.protocol.BadRequest` if roles are to follow objectives that were not given."""
    if roles == "auto" and (objectives.ttft is None or objectives.tpot is None):
        raise BadRequest("roles: auto needs --objective-ttft and --objective-tpot", "roles")
