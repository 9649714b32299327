"""Output of every workload: conversations of token ids and their lengths; and the sources of randomness and words."""

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
    """Text to token ids and back, in the served model's tokens."""

    @property
    def size(self) -> int:
        """Ids are below this."""
        ...

    @property
    def special(self) -> frozenset[int]:
        """Ids that are not text: ends of sequences, roles, padding."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, with nothing added before or after it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""
        ...


def random_ids(vocabulary: Vocabulary, count: int, rng: Random) -> tuple[int, ...]:
    """``count`` ids, uniform over all text ids."""
    size, special = vocabulary.size, vocabulary.special
    found: list[int] = []
    while len(found) < count:
        found += [token for token in rng.choices(range(size), k=count - len(found)) if token not in special]
    return tuple(found)


def draw_length(mean: float, deviation: float, rng: Random, least: int = 1) -> int:
    """A normal deviate rounded to a whole number of tokens, drawn again until it is at least ``least``.

    If the mean is too far below ``least``, returns ``least``.
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

    ``tokens`` are the new part of its prompt: the prompt is the whole conversation before, answers included, and these.
    ``think_time`` passes between the end of the turn before and this one (seconds). ``text`` is the original of
    ``tokens`` if the workload was text. ``is_after_tool``: a tool ran in that time.
    """

    tokens: tuple[int, ...]
    output_len: int
    think_time: float = 0.0
    text: str | None = None
    is_after_tool: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests that follow one another; most have a single turn.

    ``offset`` is its time in a trace (seconds); ``group`` names the conversations with its prefix; ``phase`` is its
    part of the workload.
    """

    turns: tuple[ConversationTurn, ...]
    offset: float | None = None
    group: str | None = None
    phase: int = 0

    @property
    def requests(self) -> int:
        """How many requests it makes."""
        return len(self.turns)


@dataclass(frozen=True)
class Draw:
    """The sources of a workload's randomness.

    ``shape`` decides lengths, choices and pauses; ``content`` decides the words. Two runs that share only the first
    request the same work, and match nothing of each other in a prefix cache. ``content_seed`` is for content that must
    be the same everywhere, such as a trace's hashed blocks.
    """

    vocabulary: Vocabulary
    shape: Random
    content: Random
    content_seed: str


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """One kind of request. ``weight`` is its share of a mix, relative to the others."""

    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0

    def conversations(self, draw: Draw) -> Iterator[Conversation]:
        """Conversations without end, or in the order of a recorded trace until it ends."""
        raise NotImplementedError

    @property
    def finite(self) -> bool:
        """Whether it ends by itself: a recorded trace."""
        return False
