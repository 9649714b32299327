"""The output of workloads (conversations of token ids, with lengths), and the sources of randomness and words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Protocol

import msgspec

FEW_TRIES = 1000
Tokens = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Spread = Annotated[float, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Vocabulary(Protocol):
    """A mapping between text and the token ids of the served model."""

    @property
    def size(self) -> int:
        """Number of ids: every id is smaller."""
        ...

    @property
    def special(self) -> frozenset[int]:
        """Ids that are not text: end of sequence, roles, padding."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, without special tokens before or after it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``."""
        ...


def random_ids(vocabulary: Vocabulary, count: int, rng: Random) -> tuple[int, ...]:
    """Return ``count`` ids, drawn uniformly from all text ids."""
    size, special = vocabulary.size, vocabulary.special
    found: list[int] = []
    while len(found) < count:
        found += [token for token in rng.choices(range(size), k=count - len(found)) if token not in special]
    return tuple(found)


def draw_length(mean: float, deviation: float, rng: Random, least: int = 1) -> int:
    """Return a normal deviate, rounded to a whole number of tokens, that is at least ``least``.

    Smaller ones are drawn again. If all draws are too small, return ``least``.
    """
    if deviation <= 0:
        return max(least, round(mean))
    for _ in range(FEW_TRIES):
        length = round(rng.gauss(mean, deviation))
        if length >= least:
            return length
    return least


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """One request of a conversation.

    Its prompt is the whole conversation before, with answers, followed by ``tokens``. ``think_time`` is the time from
    the end of the turn before to this turn, in seconds; ``is_after_tool`` is True if a tool ran in that time. ``text``
    is the source of ``tokens`` if the workload has texts.
    """

    tokens: tuple[int, ...]
    output_len: int
    think_time: float = 0.0
    text: str | None = None
    is_after_tool: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """A sequence of requests in one dialogue; most conversations have a single turn.

    ``offset`` is its time in a trace, in seconds (None: no trace). ``group`` is equal for conversations that share a
    prefix; ``phase`` is the index of the workload's phase.
    """

    turns: tuple[ConversationTurn, ...]
    offset: float | None = None
    group: str | None = None
    phase: int = 0

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.turns)


@dataclass(frozen=True)
class Draw:
    """The sources of a workload's randomness.

    ``shape`` decides lengths, choices and pauses; ``content`` decides the words. Two runs that share only ``shape``
    request the same amount of work, and do not match each other's prefixes in a cache. ``content_seed`` is for content
    that must be the same everywhere, such as a trace's hashed blocks.
    """

    vocabulary: Vocabulary
    shape: Random
    content: Random
    content_seed: str


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """One kind of requests. ``weight`` is its share of a mix, relative to the other kinds."""

    weight: Annotated[float, msgspec.Meta(gt=0, le=1_000_000)] = 1.0

    def conversations(self, draw: Draw) -> Iterator[Conversation]:
        """Yield conversations without end, or those of a recorded trace in order."""
        raise NotImplementedError

    @property
    def finite(self) -> bool:
        """True for a recorded trace, which ends."""
        return False
