"""Settings of moves of running sequences between engines: how, how many at once, and by which policies."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tercet.settings.declaration import AtLeastOne, NotNegative, Seconds, Setting, Settings
from tercet.settings.panels import MOVES

Share = Annotated[float, Meta(gt=0, le=1)]
KVCaches = Annotated[float, Meta(gt=0, le=1_000_000_000)]


class MoveSettings(Settings, frozen=True):
    """Settings of one move, and the limits of all moves of one process; every limit applies.

    A limit per engine applies separately to moves to an engine and to moves from it.
    """

    stages: Annotated[
        AtLeastOne, Setting("Most stages of a move before the cut-over.", panel=MOVES, in_file=True)
    ] = msgspec.field(default=4, name="move-stages")  # fmt: skip
    tail: Annotated[
        NotNegative,
        Setting(
            "Tokens that the last stage of a move may leave uncopied; the destination recomputes them.",
            panel=MOVES,
            in_file=True,
        ),
    ] = msgspec.field(default=16, name="move-tail")
    portion: Annotated[
        AtLeastOne,
        Setting(
            "Tokens whose KV is sent at once; a stage rests after each portion.",
            unit="tokens", panel=MOVES, in_file=True,
        ),
    ] = msgspec.field(default=512, name="move-portion")  # fmt: skip
    share: Annotated[
        Share, Setting("Share of a stage's time in which KV is sent, up to 1; 1: no rests.", panel=MOVES, in_file=True)
    ] = msgspec.field(default=0.25, name="move-share")  # fmt: skip
    hurry_at: Annotated[
        Share,
        Setting(
            "KV usage of the source engine, from 0 to 1, at or above which a move takes no rests. It also takes none "
            "while requests wait there.",
            panel=MOVES,
            in_file=True,
        ),
    ] = msgspec.field(default=0.8, name="move-hurry-at")
    deadline_s: Annotated[
        Seconds,
        Setting(
            "Longest duration of a move; after it the sequence stays on its engine.",
            unit="seconds",
            panel=MOVES,
            in_file=True,
        ),
    ] = msgspec.field(default=30.0, name="move-deadline")
    at_once: Annotated[
        AtLeastOne, Setting("Most sequences that are moved at once.", panel=MOVES)
    ] = msgspec.field(default=16, name="max-moves")  # fmt: skip
    per_engine: Annotated[
        AtLeastOne, Setting("Most sequences that are moved to or from one engine at once.", panel=MOVES)
    ] = msgspec.field(default=2, name="max-moves-per-engine")  # fmt: skip
    tokens: Annotated[
        AtLeastOne | None,
        Setting(
            "Most tokens of all sequences that are moved at once; a single sequence may have more.",
            default="no limit",
            panel=MOVES,
            in_file=True,
        ),
    ] = msgspec.field(default=None, name="max-move-tokens")
    tokens_per_engine: Annotated[
        AtLeastOne | None,
        Setting(
            "Most tokens that are moved to one engine, or from one, at once.",
            default="no limit",
            panel=MOVES,
            in_file=True,
        ),
    ] = msgspec.field(default=None, name="max-move-tokens-per-engine")
    kv_usage: Annotated[
        KVCaches | None,
        Setting(
            "Most KV of all sequences that are moved at once, as a multiple of an engine's KV cache; a single sequence "
            "may have more.",
            default="no limit", panel=MOVES, in_file=True,
        ),
    ] = msgspec.field(default=None, name="max-move-kv-usage")  # fmt: skip
    kv_usage_per_engine: Annotated[
        KVCaches | None,
        Setting(
            "Most KV that is moved to one engine, or from one, at once, as a multiple of its KV cache.",
            default="no limit", panel=MOVES, in_file=True,
        ),
    ] = msgspec.field(default=None, name="max-move-kv-usage-per-engine")  # fmt: skip
    ceiling: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        Setting(
            "KV usage of an engine, from 0 to 1, at or above which no sequence is moved to it.",
            panel=MOVES,
            in_file=True,
        ),
    ] = msgspec.field(default=0.95, name="move-ceiling")

    def share_at(self, usage: float, waiting: int) -> float:
        """Return the share of a stage's time in which KV is sent from an engine with the KV usage ``usage`` (0 to 1).

        Rests leave time to the sequences that decode there. While ``waiting`` requests have no room, or the cache is
        nearly full, rests cost more than they gain.
        """
        return 1.0 if waiting or usage >= self.hurry_at else self.share


class RescheduleSettings(Settings, frozen=True):
    """Policies that propose moves, and their parameters."""

    policies: Annotated[
        tuple[str, ...],
        Setting(
            "Policy that proposes moves: `prefill_to_decode`, `decode_load`, `neutral_load`, `binpack_mitigation`, "
            "`binpack_consolidation`, `defragment`, or your own: `file.py:function`. Repeatable.",
            flag="--reschedule", panel=MOVES,
        ),
    ] = msgspec.field(default=(), name="reschedule")  # fmt: skip
    stale_after_s: Annotated[
        Seconds,
        Setting(
            "Time without progress after which an engine's sequences are moved away; less than `--stuck-after`.",
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
        Setting("Difference of KV usage, 0 to 1, at which loads are balanced.", panel=MOVES),
    ] = msgspec.field(default=0.2, name="reschedule-threshold")
    ceiling: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        Setting("KV usage, from 0 to 1, up to which packing policies fill an engine.", panel=MOVES, in_file=True),
    ] = msgspec.field(default=0.8, name="reschedule-ceiling")  # fmt: skip
    order: Annotated[
        Literal["FIT", "SR", "LR", "FCR", "LCR", "FCW", "FCWSR"],
        Setting("Order in which load balancing and `binpack_mitigation` move sequences.", panel=MOVES, in_file=True),
    ] = msgspec.field(default="FIT", name="reschedule-order")
    measure: Annotated[
        Literal["num_req", "num_tokens", "block_ratio"],
        Setting("Unit of `reschedule-value`: sequences, tokens or share of the KV cache.", panel=MOVES, in_file=True),
    ] = msgspec.field(default="num_req", name="reschedule-measure")
    value: Annotated[
        Annotated[float, Meta(gt=0, le=1_000_000_000)],
        Setting(
            "Most load that one round moves from an engine, in the unit of `reschedule-measure`.",
            panel=MOVES,
            in_file=True,
        ),
    ] = msgspec.field(default=1.0, name="reschedule-value")
