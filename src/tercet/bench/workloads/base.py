"""What every kind of workload has in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Annotated

import msgspec

from tercet.bench.workloads.vocabulary import Vocabulary

Tokens = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Spread = Annotated[float, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation.

    ``tokens`` are what is new in its prompt: the prompt is everything that was said before, answers included, and
    these. ``think_time`` passes between the end of the turn before and this one (seconds). ``text`` is the original of
    ``tokens`` where the workload was text.
    """

    tokens: tuple[int, ...]
    output_len: int
    think_time: float = 0.0
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests that follow one another; most have a single turn.

    ``offset`` is when a trace recorded it (seconds); ``group`` names what it shares a prefix with; ``phase`` is the
    part of the workload that it belongs to.
    """

    turns: tuple[Turn, ...]
    offset: float | None = None
    group: str | None = None
    phase: int = 0

    @property
    def requests(self) -> int:
        """How many requests it makes."""
        return len(self.turns)


@dataclass(frozen=True)
class Draw:
    """Where a workload takes its randomness from.

    ``shape`` decides lengths, choices and pauses; ``content`` decides the words. Two runs that share the first and not
    the second ask for the same work, and find nothing of each other in a prefix cache. ``content_seed`` is for content
    that must come out the same wherever it is asked for, such as a trace's hashed blocks.
    """

    vocabulary: Vocabulary
    shape: Random
    content: Random
    content_seed: str


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """One kind of request. ``weight`` is its part of a mix, relative to the others of the mix."""

    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0

    def conversations(self, draw: Draw) -> Iterator[Conversation]:
        """Conversations without end, or in the order of a recorded trace until it ends."""
        raise NotImplementedError

    @property
    def finite(self) -> bool:
        """Whether it ends by itself: a recorded trace."""
        return False
