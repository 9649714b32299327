"""The tricks of a hostile client and their times: a pure function of a seed. :mod:`.adversary` plays them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from tercet.protocol import BadRequest

TrickKind = Literal[
    "many_sequences", "long_bodies", "odd_text", "poisonous_grammars", "unfinished_bodies", "unfinished_heads",
    "long_heads", "silence", "slow_reading", "leaving",
]  # fmt: skip
"""
- ``many_sequences``: prompts and choices of one request by the thousand.
- ``long_bodies``: tens of thousands of one thing: messages, parts, tools, choices, stop strings, token ids, letters.
- ``odd_text``: JSON that is none, half of a surrogate pair, numbers without an end, lists in lists in lists.
- ``poisonous_grammars``: structures that take an engine's core seconds to compile, or have no end.
- ``unfinished_bodies``: several large bodies at once that do not end.
- ``unfinished_heads``: heads that do not end.
- ``long_heads``: heads of a megabyte.
- ``silence``: connections that say nothing.
- ``slow_reading``: a stream that its client does not read.
- ``leaving``: a client that leaves in the middle: of its head, its body, the wait for the answer, the answer.
"""
TRICKS: tuple[TrickKind, ...] = get_args(TrickKind)
NO_TRICKS = "none"


class PlannedTrick(msgspec.Struct, frozen=True):
    """A trick that begins at second ``at``; the run's seed and ``number`` determine its bodies."""

    at: float
    kind: TrickKind
    number: int

    def __str__(self) -> str:
        return f"{self.at:9.3f} s  {self.kind}"


class PlayedTrick(msgspec.Struct, frozen=True, kw_only=True):
    """A trick and its result: the statuses of its answers, 0 for a connection that was closed without one.

    ``wrong`` is the fault of the router; empty if there was none.
    """

    planned: PlannedTrick
    began: float
    ended: float
    statuses: tuple[int, ...] = ()
    wrong: str = ""


def plan_tricks(seed: int, seconds: float, per_minute: float, kinds: Sequence[TrickKind]) -> tuple[PlannedTrick, ...]:
    """Tricks at random times, each kind as often as the others; the same for a seed."""
    chance, now, found = random.Random(f"{seed} tricks"), 0.0, list[PlannedTrick]()
    turn: list[TrickKind] = []
    while kinds and (now := now + chance.expovariate(per_minute / 60)) < seconds:
        turn = turn or chance.sample(list(kinds), len(kinds))
        found.append(PlannedTrick(round(now, 6), turn.pop(), len(found)))
    return tuple(found)


def parse_tricks(given: str) -> tuple[TrickKind, ...]:
    """``KIND[,KIND...]``, or ``none``; raises :class:`~tercet.protocol.BadRequest`."""
    names = [name.strip().replace("-", "_") for name in given.split(",")]
    if names == [NO_TRICKS]:
        return ()
    wrong = [name for name in names if name not in TRICKS]
    if wrong:
        raise BadRequest(f"--adversary: there is no {wrong[0]!r}; choose of {', '.join(TRICKS)}, or none", "adversary")
    return tuple(kind for kind in TRICKS if kind in names)
