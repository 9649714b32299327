"""Objectives of requests, and the source of engines' roles: operators or the router."""

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
        "Source of the roles prefill and decode; `fixed`: as given, `auto`: the router changes them with the load. "
        "`auto` needs both objectives.",
        panel=OBJECTIVES,
    ),
]


DEFAULT_CLASS = "default"
MOST_CLASSES = 16


class ObjectiveClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The objectives of requests whose header has this ``name``: limits in seconds, None means no limit."""

    name: Annotated[str, Meta(pattern=r"^[\w.-]+\Z", max_length=64)]
    ttft: Seconds | None = None
    tpot: Seconds | None = None
    share: Share = 0.99

    def __post_init__(self) -> None:
        if self.ttft is None and self.tpot is None:
            raise BadRequest(f"objective-class: {self.name} has neither ttft nor tpot; give it one", "objective-class")


def class_fields(given: Any, _index: int) -> Any:
    """Return the fields of an :class:`ObjectiveClass`, given as a mapping or as ``NAME[,ttft=S][,tpot=S][,share=S]``.

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
        return given  # msgspec refuses it later, with the field's name


class Objectives(Settings, frozen=True):
    """Latency limits, in seconds, that a ``share`` of the requests must meet; None means no limit.

    Requests whose ``header`` names one of the ``classes`` have the limits of that class instead.
    :func:`tercet.decisions.objectives.meets` is the rule.
    """

    ttft: Annotated[
        Seconds | None,
        Setting(
            "Objective for the time to the first token.",
            unit="seconds",
            default="none",
            panel=OBJECTIVES,
        ),
    ] = msgspec.field(default=None, name="objective-ttft")
    tpot: Annotated[
        Seconds | None,
        Setting(
            "Objective for the mean time per further token.",
            unit="seconds",
            default="none",
            panel=OBJECTIVES,
        ),
    ] = msgspec.field(default=None, name="objective-tpot")
    share: Annotated[
        Share, Setting("Share of requests, 0 to 1, that must meet the objectives.", panel=OBJECTIVES)
    ] = msgspec.field(default=0.99, name="objective-share")  # fmt: skip
    classes: Annotated[
        tuple[ObjectiveClass, ...],
        Setting(
            "Objectives of a class of requests; ttft and tpot in seconds, share from 0 to 1. Repeatable.",
            metavar="NAME,ttft=S", read=class_fields, panel=OBJECTIVES,
        ),
    ] = msgspec.field(default=(), name="objective-class")  # fmt: skip
    header: Annotated[
        Annotated[str, Meta(pattern=r"^[a-z0-9-]+\Z", max_length=64)],
        Setting("Name of the header that has a request's class, in lower case.", in_file=True, panel=OBJECTIVES),
    ] = msgspec.field(default="x-objective-class", name="objective-header")

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [DEFAULT_CLASS, *(each.name for each in self.classes)]
        if len({*names}) < len(names):
            raise BadRequest(
                f"objective-class: each class needs a different name, and not {DEFAULT_CLASS}, which is the name for "
                "requests without a class",
                "objective-class",
            )
        if len(self.classes) > MOST_CLASSES:
            raise BadRequest(
                f"objective-class: at most {MOST_CLASSES} classes are allowed, since each is a series of metrics",
                "objective-class",
            )

    def class_of(self, headers: Mapping[str, str]) -> ObjectiveClass | None:
        """Return the class that a request's headers name; None if they name none, or an unknown one."""
        if not self.classes:
            return None
        named = headers.get(self.header)
        return next((each for each in self.classes if each.name == named), None)

    @property
    def any(self) -> bool:
        """True if a latency has a limit."""
        return self.ttft is not None or self.tpot is not None


def require_objectives(roles: str, objectives: Objectives) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if ``roles`` is ``auto`` and an objective is missing."""
    if roles == "auto" and (objectives.ttft is None or objectives.tpot is None):
        raise BadRequest("roles: auto needs objectives; set --objective-ttft and --objective-tpot", "roles")
