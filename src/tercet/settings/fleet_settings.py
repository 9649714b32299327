"""What a router does with its engines: the objectives and who sets roles, moves of running sequences, sessions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from tercet.protocol import BadRequest
from tercet.settings.declaration import (
    LIMITS,
    MOVES,
    PLACEMENT,
    SERVER,
    AtLeastOne,
    NotNegative,
    Seconds,
    Setting,
    Settings,
    key_values,
)

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
            raise BadRequest(f"{self.name} has neither ttft nor tpot; give it one", "objective-class")


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

    panel: ClassVar[str] = OBJECTIVES
    ttft: Annotated[
        Seconds | None, Setting("Objective for the time to the first token.", unit="seconds", default="none")
    ] = msgspec.field(default=None, name="objective-ttft")
    tpot: Annotated[
        Seconds | None, Setting("Objective for the mean time per further token.", unit="seconds", default="none")
    ] = msgspec.field(default=None, name="objective-tpot")
    share: Annotated[Share, Setting("Share of requests, 0 to 1, that must meet the objectives.")] = msgspec.field(
        default=0.99, name="objective-share"
    )
    classes: Annotated[
        tuple[ObjectiveClass, ...],
        Setting(
            "Objectives of a class of requests; ttft and tpot in seconds, share from 0 to 1. Repeatable.",
            metavar="NAME,ttft=S", read=class_fields
        )
    ] = msgspec.field(default=(), name="objective-class")  # fmt: skip
    # One name is enough: classes are the deployment's, and so is what sets the header.
    header: str = "x-objective-class"

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


KVCaches = Annotated[float, Meta(gt=0, le=1_000_000_000)]


class MoveSettings(Settings, frozen=True):
    """Settings of one move, and the limits of all moves of one process; every limit applies.

    A limit per engine applies separately to moves to an engine and to moves from it.
    """

    panel: ClassVar[str] = MOVES
    # Each stage sends what came during the one before; four leave a few tokens for every model that was measured.
    stages: AtLeastOne = 4
    # Tokens that the last stage may leave uncopied: the destination recomputes a block faster than a stage takes.
    tail: NotNegative = 16
    # Tokens whose KV is sent at once; a stage rests after each portion.
    portion: AtLeastOne = 512
    share: Annotated[
        Share, Setting("Share of a stage's time in which KV is sent, up to 1; 1: no rests.", in_file=True)
    ] = msgspec.field(default=0.25, name="move-share")
    # KV usage of the source engine at or above which a move takes no rests: what waits for room there waits longer than
    # a step that the move makes slower.
    hurry_at: Share = 0.8
    # Seconds after which the sequence stays: a move that takes longer gains nothing.
    deadline_s: Seconds = 30.0
    at_once: Annotated[AtLeastOne, Setting("Most sequences that are moved at once.")] = msgspec.field(
        default=16, name="max-moves"
    )
    per_engine: Annotated[AtLeastOne, Setting("Most sequences that are moved to or from one engine at once.")] = (
        msgspec.field(default=2, name="max-moves-per-engine")
    )
    tokens: Annotated[
        AtLeastOne | None,
        Setting(
            "Most tokens of all sequences that are moved at once; a single sequence may have more.",
            default="no limit",
            in_file=True,
        ),
    ] = msgspec.field(default=None, name="max-move-tokens")
    tokens_per_engine: Annotated[
        AtLeastOne | None,
        Setting("Most tokens that are moved to one engine, or from one, at once.", default="no limit", in_file=True),
    ] = msgspec.field(default=None, name="max-move-tokens-per-engine")
    kv_usage: Annotated[
        KVCaches | None,
        Setting(
            "Most KV of all sequences that are moved at once, as a multiple of an engine's KV cache; a single sequence "
            "may have more.",
            default="no limit", in_file=True
        )
    ] = msgspec.field(default=None, name="max-move-kv-usage")  # fmt: skip
    kv_usage_per_engine: Annotated[
        KVCaches | None,
        Setting(
            "Most KV that is moved to one engine, or from one, at once, as a multiple of its KV cache.",
            default="no limit", in_file=True
        )
    ] = msgspec.field(default=None, name="max-move-kv-usage-per-engine")  # fmt: skip
    # KV usage at or above which an engine receives nothing: the rest is for the sequences that it has.
    ceiling: Annotated[float, Meta(ge=0, le=1)] = 0.95

    def share_at(self, usage: float, waiting: int) -> float:
        """Return the share of a stage's time in which KV is sent from an engine with the KV usage ``usage`` (0 to 1).

        Rests leave time to the sequences that decode there. While ``waiting`` requests have no room, or the cache is
        nearly full, rests cost more than they gain.
        """
        return 1.0 if waiting or usage >= self.hurry_at else self.share


class RescheduleSettings(Settings, frozen=True):
    """Policies that propose moves, and their parameters."""

    panel: ClassVar[str] = MOVES
    policies: Annotated[
        tuple[str, ...],
        Setting(
            "Policy that proposes moves: `prefill_to_decode`, `decode_load`, `neutral_load`, `binpack_mitigation`, "
            "`binpack_consolidation`, `defragment`, or your own: `file.py:function`. Repeatable.",
            flag="--reschedule",
        ),
    ] = msgspec.field(default=(), name="reschedule")
    # Seconds without progress after which sequences are moved away: half of the default of `stuck-after`.
    stale_after_s: Seconds = 2.5
    interval_s: Annotated[Seconds, Setting("Interval between rescheduling rounds.", unit="seconds")] = msgspec.field(
        default=0.1, name="reschedule-interval"
    )
    threshold: Annotated[
        Annotated[float, Meta(ge=0, le=1)], Setting("Difference of KV usage, 0 to 1, at which loads are balanced.")
    ] = msgspec.field(default=0.2, name="reschedule-threshold")
    # KV usage up to which packing policies fill an engine: a fifth is left for sequences that grow.
    ceiling: Annotated[float, Meta(gt=0, le=1)] = 0.8
    order: Annotated[
        Literal["FIT", "SR", "LR", "FCR", "LCR", "FCW", "FCWSR"],
        Setting("Order in which load balancing and `binpack_mitigation` move sequences.", in_file=True),
    ] = msgspec.field(default="FIT", name="reschedule-order")
    measure: Annotated[
        Literal["num_req", "num_tokens", "block_ratio"],
        Setting("Unit of `reschedule-value`: sequences, tokens or share of the KV cache.", in_file=True),
    ] = msgspec.field(default="num_req", name="reschedule-measure")
    value: Annotated[
        Annotated[float, Meta(gt=0, le=1_000_000_000)],
        Setting("Most load that one round moves from an engine, in the unit of `reschedule-measure`.", in_file=True),
    ] = msgspec.field(default=1.0, name="reschedule-value")


ShareOfKV = Annotated[float, Meta(ge=0, le=1)]


class BatchSettings(Settings, frozen=True):
    """Settings of a router for OpenAI's batches, whose requests run in the gaps of other traffic."""

    directory: Annotated[
        str | None,
        Setting(
            "Folder of the files of batches; with it `/v1/files` and `/v1/batches` are served.", metavar="DIR",
            default="no batches", panel=SERVER,
        ),
    ] = msgspec.field(default=None, name="batches")  # fmt: skip
    running: Annotated[
        AtLeastOne, Setting("Most requests of batches that run for each decode engine.", panel=LIMITS, in_file=True)
    ] = msgspec.field(default=32, name="batch-running")
    storage: Annotated[
        AtLeastOne,
        Setting("Most bytes of the files of batches.", unit="bytes", default="10 GiB", panel=LIMITS, in_file=True),
    ] = msgspec.field(default=10 * 1024**3, name="batch-storage")


class SessionSettings(Settings, frozen=True):
    """Settings of a router for the turns of one session."""

    panel: ClassVar[str] = PLACEMENT
    together: Annotated[Literal["on", "off"], Setting("Send all turns of a session to one engine.")] = msgspec.field(
        default="off", name="sessions"
    )
    keep: Annotated[
        Literal["none", "tools", "all"],
        Setting("Sessions whose KV is pinned between two turns; `tools`: those that wait for a tool's result."),
    ] = msgspec.field(default="tools", name="session-keep")
    # Longest time that KV is pinned: most tools answer within it, and an unused lease holds blocks.
    keep_s: Seconds = 30.0
    # Share of an engine's KV cache that all sessions together may pin.
    keep_share: ShareOfKV = 0.3
    # KV usage at or above which pinned KV is released; also while requests wait.
    give_up_at: ShareOfKV = 0.9
    # Seconds without a turn after which a session is forgotten.
    ttl_s: Seconds = 3600.0
    # Most sessions, and most of their tokens (4 bytes each), that a process remembers: bounds of its memory. A session
    # without remembered tokens is recomputed when its engine is drained.
    most: AtLeastOne = 10_000
    tokens: AtLeastOne = 32 * 1024 * 1024

    @property
    def on(self) -> bool:
        """True if all turns of a session go to one engine."""
        return self.together == "on"
