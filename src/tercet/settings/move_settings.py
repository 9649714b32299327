"""How running sequences are moved between engines, how many at a time, and by which policies."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tercet.settings.declaration import AtLeastOne, NotNegative, Seconds, Setting, Settings
from tercet.settings.panels import MOVES

Share = Annotated[float, Meta(gt=0, le=1)]
KVCaches = Annotated[float, Meta(gt=0, le=1_000_000_000)]


class MoveSettings(Settings, frozen=True):
    """How the KV of one sequence is moved, and limits of all moves of one process; each of them holds.

    The limits of one engine hold in either direction by themselves.
    """

    stages: Annotated[
        AtLeastOne, Setting("Stages of a move at most, before the sequence is cut over.", panel=MOVES, in_file=True)
    ] = msgspec.field(default=4, name="move-stages")  # fmt: skip
    tail: Annotated[
        NotNegative,
        Setting(
            "Tokens: a stage that leaves at most this many uncopied is the last one; the destination recomputes them.",
            panel=MOVES,
            in_file=True,
        ),
    ] = msgspec.field(default=16, name="move-tail")
    portion: Annotated[
        AtLeastOne,
        Setting(
            "Tokens whose KV is sent in one go; a stage rests after each.", unit="tokens", panel=MOVES, in_file=True,
        ),
    ] = msgspec.field(default=512, name="move-portion")  # fmt: skip
    share: Annotated[
        Share, Setting("Share of a stage's time in which KV is sent; 1 for no rests.", panel=MOVES, in_file=True)
    ] = msgspec.field(default=0.25, name="move-share")  # fmt: skip
    hurry_at: Annotated[
        Share,
        Setting(
            "KV usage of the engine that a sequence leaves from which on its move takes no rests; nor does it while "
            "requests wait there.",
            panel=MOVES,
            in_file=True,
        ),
    ] = msgspec.field(default=0.8, name="move-hurry-at")
    deadline_s: Annotated[
        Seconds,
        Setting(
            "Longest duration of a move; then the sequence stays where it is.",
            unit="seconds",
            panel=MOVES,
            in_file=True,
        ),
    ] = msgspec.field(default=30.0, name="move-deadline")
    at_once: Annotated[
        AtLeastOne, Setting("Sequences on their way at once.", panel=MOVES)
    ] = msgspec.field(default=16, name="max-moves")  # fmt: skip
    per_engine: Annotated[
        AtLeastOne, Setting("Sequences on their way to one engine, or from one, at once.", panel=MOVES)
    ] = msgspec.field(default=2, name="max-moves-per-engine")  # fmt: skip
    tokens: Annotated[
        AtLeastOne | None,
        Setting(
            "Tokens of sequences on their way at once; one alone may have more.",
            default="no limit",
            panel=MOVES,
            in_file=True,
        ),
    ] = msgspec.field(default=None, name="max-move-tokens")
    tokens_per_engine: Annotated[
        AtLeastOne | None,
        Setting("The same, to one engine or from one.", default="no limit", panel=MOVES, in_file=True),
    ] = msgspec.field(default=None, name="max-move-tokens-per-engine")
    kv_usage: Annotated[
        KVCaches | None,
        Setting(
            "KV of sequences on their way at once, in KV caches of an engine; one alone may have more.",
            default="no limit", panel=MOVES, in_file=True,
        ),
    ] = msgspec.field(default=None, name="max-move-kv-usage")  # fmt: skip
    kv_usage_per_engine: Annotated[
        KVCaches | None,
        Setting("The same, to one engine or from one.", default="no limit", panel=MOVES, in_file=True),
    ] = msgspec.field(default=None, name="max-move-kv-usage-per-engine")
    ceiling: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        Setting(
            "Share of an engine's KV cache in use from which on nothing is moved to it.", panel=MOVES, in_file=True
        ),
    ] = msgspec.field(default=0.95, name="move-ceiling")

    def share_at(self, usage: float, waiting: int) -> float:
        """Share of a stage's time in which KV is sent from an engine that uses ``usage`` of its KV cache.

        Rests spare those that decode there. While ``waiting`` requests have no room, or nearly no room is left, they
        cost more than they spare.
        """
        return 1.0 if waiting or usage >= self.hurry_at else self.share


class RescheduleSettings(Settings, frozen=True):
    """Which policies propose moves, and what they choose."""

    policies: Annotated[
        tuple[str, ...],
        Setting(
            "A policy that proposes moves: `prefill_to_decode`, `decode_load`, `neutral_load`, `binpack_mitigation`, "
            "`binpack_consolidation`, `defragment`, or your own: `file.py:function`. Repeatable.",
            flag="--reschedule", panel=MOVES,
        ),
    ] = msgspec.field(default=(), name="reschedule")  # fmt: skip
    stale_after_s: Annotated[
        Seconds,
        Setting(
            "Time without progress after which an engine is emptied; less than `--stuck-after`.",
            unit="seconds",
            panel=MOVES,
            in_file=True,
        ),
    ] = msgspec.field(default=2.5, name="reschedule-stale-after")
    interval_s: Annotated[
        Seconds, Setting("Interval between rescheduling rounds.", unit="seconds", panel=MOVES)
    ] = msgspec.field(default=0.1, name="reschedule-interval")  # fmt: skip
    threshold: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        Setting("Difference of two engines' KV usage from which on their loads are balanced.", panel=MOVES),
    ] = msgspec.field(default=0.2, name="reschedule-threshold")
    ceiling: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        Setting("KV usage up to which the policies that pack engines fill one.", panel=MOVES, in_file=True),
    ] = msgspec.field(default=0.8, name="reschedule-ceiling")  # fmt: skip
    order: Annotated[
        Literal["FIT", "SR", "LR", "FCR", "LCR", "FCW", "FCWSR"],
        Setting(
            "Which sequences are moved first, to balance loads and by `binpack_mitigation`.", panel=MOVES, in_file=True
        ),
    ] = msgspec.field(default="FIT", name="reschedule-order")
    measure: Annotated[
        Literal["num_req", "num_tokens", "block_ratio"],
        Setting("Unit of `reschedule-value`: sequences, tokens or share of the KV cache.", panel=MOVES, in_file=True),
    ] = msgspec.field(default="num_req", name="reschedule-measure")
    value: Annotated[
        Annotated[float, Meta(gt=0, le=1_000_000_000)],
        Setting(
            "Most that one round moves from an engine, in the unit of `reschedule-measure`.",
            panel=MOVES,
            in_file=True,
        ),
    ] = msgspec.field(default=1.0, name="reschedule-value")
