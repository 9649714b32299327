"""How running sequences are moved between engines, and how many at a time."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tercet.settings.declaration import Setting, Settings

AtLeastOne = Annotated[int, Meta(ge=1)]
MOVES = "Moves"


class MoveSettings(Settings, frozen=True):
    """How the KV of one sequence is moved, and limits of all moves of one process; each of them holds.

    The limits of one engine hold in either direction by themselves.
    """

    stages: Annotated[
        AtLeastOne, Setting("Stages of a move at most, before the sequence is cut over.", panel=MOVES)
    ] = msgspec.field(default=4, name="move-stages")  # fmt: skip
    tail: Annotated[
        Annotated[int, Meta(ge=0)],
        Setting("A stage is the last one if no more tokens come meanwhile: the rest is computed anew.", panel=MOVES),
    ] = msgspec.field(default=16, name="move-tail")
    deadline_s: Annotated[
        Annotated[float, Meta(gt=0, le=1_000_000_000)],
        Setting("How long a move may take; then the sequence stays where it is.", unit="seconds", panel=MOVES),
    ] = msgspec.field(default=30.0, name="move-deadline")
    at_once: Annotated[
        AtLeastOne, Setting("Sequences on their way at once.", panel=MOVES)
    ] = msgspec.field(default=16, name="max-moves")  # fmt: skip
    per_engine: Annotated[
        AtLeastOne, Setting("Sequences on their way to one engine, or from one, at once.", panel=MOVES)
    ] = msgspec.field(default=2, name="max-moves-per-engine")  # fmt: skip
    tokens: Annotated[
        AtLeastOne | None,
        Setting("Tokens of sequences on their way at once; one alone may have more.", default="no limit", panel=MOVES),
    ] = msgspec.field(default=None, name="max-move-tokens")
    tokens_per_engine: Annotated[
        AtLeastOne | None,
        Setting("The same, to one engine or from one.", default="no limit", panel=MOVES),
    ] = msgspec.field(default=None, name="max-move-tokens-per-engine")
    kv_usage: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        Setting("Share of an engine's KV cache in use from which on nothing is moved to it.", panel=MOVES),
    ] = msgspec.field(default=0.95, name="max-move-kv-usage")
