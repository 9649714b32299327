"""The tricks of a hostile client and their times, computed from a seed. :mod:`.adversary` plays them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from tercet.protocol import BadRequest

TrickKind = Literal[
    "many_sequences", "long_bodies", "wrong_items", "odd_text", "odd_labels", "poisonous_grammars", "unfinished_bodies",
    "unfinished_heads", "long_heads", "long_names", "silence", "slow_reading", "leaving",
]  # fmt: skip
"""
- ``many_sequences``: one request with thousands of prompts or choices.
- ``long_bodies``: tens of thousands of items of one kind: messages, parts, tools, choices, stop strings, token ids,
  letters.
- ``wrong_items``: many small bodies at once, each with hundreds of wrong items in one list.
- ``odd_text``: invalid JSON, half of a surrogate pair, numbers that are not in JSON, deeply nested lists.
- ``odd_labels``: long bodies under encodings and types that they do not have, and under two types that disagree.
- ``poisonous_grammars``: structures that take an engine's core seconds to compile, or that are infinite.
- ``unfinished_bodies``: several large bodies at the same time that do not end, at the router or at a model router.
- ``unfinished_heads``: request heads that do not end.
- ``long_heads``: request heads of a megabyte.
- ``long_names``: ids, sessions, users and salts of half a megabyte.
- ``silence``: connections that send nothing.
- ``slow_reading``: a stream that its client does not read.
- ``leaving``: a client that leaves in the middle of its head, its body, the wait for the answer, or the answer.
"""
TRICKS: tuple[TrickKind, ...] = get_args(TrickKind)
NO_TRICKS = "none"


class PlannedTrick(msgspec.Struct, frozen=True):
    """A trick that begins at second ``at``. The run's seed and ``number`` determine its bodies."""

    at: float
    kind: TrickKind
    number: int

    def __str__(self) -> str:
        return f"{self.at:9.3f} s  {self.kind}"


class PlayedTrick(msgspec.Struct, frozen=True, kw_only=True):
    """A trick and its result. ``statuses`` are those of its answers, 0 for a connection that was closed without one.

    ``wrong`` describes the router's error; it is empty if the router behaved correctly.
    """

    planned: PlannedTrick
    began: float
    ended: float
    statuses: tuple[int, ...] = ()
    wrong: str = ""


def plan_tricks(seed: int, seconds: float, per_minute: float, kinds: Sequence[TrickKind]) -> tuple[PlannedTrick, ...]:
    """Return tricks at random times, with all kinds equally often. Equal seeds give equal tricks."""
    chance, now, found = random.Random(f"{seed} tricks"), 0.0, list[PlannedTrick]()
    turn: list[TrickKind] = []
    while kinds and (now := now + chance.expovariate(per_minute / 60)) < seconds:
        turn = turn or chance.sample(list(kinds), len(kinds))
        found.append(PlannedTrick(round(now, 6), turn.pop(), len(found)))
    return tuple(found)


def parse_tricks(given: str) -> tuple[TrickKind, ...]:
    """Return the kinds of a text ``KIND[,KIND...]`` or ``none``. Raise ``BadRequest`` for an unknown kind."""
    names = [name.strip().replace("-", "_") for name in given.split(",")]
    if names == [NO_TRICKS]:
        return ()
    wrong = [name for name in names if name not in TRICKS]
    if wrong:
        raise BadRequest(
            f"--adversary: {wrong[0]!r} is not a trick; choose from {', '.join(TRICKS)}, or none", "adversary"
        )
    return tuple(kind for kind in TRICKS if kind in names)
