"""What a workload needs of a tokenizer, and one that needs no model."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from random import Random
from typing import Protocol


class Vocabulary(Protocol):
    """Text to token ids and back, in the served model's tokens."""

    @property
    def size(self) -> int:
        """Ids are below this."""
        ...

    @property
    def special(self) -> frozenset[int]:
        """Ids that are no text: ends of sequences, roles, padding."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, with nothing added before or after it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""
        ...


class HashedWords:
    """A vocabulary without a model: each word has the id that its CRC-32 gives it. For simulated engines and tests.

    Text that is alike has ids that are alike, so prefixes match as they do with a real tokenizer; lengths in tokens are
    exact by construction of the workloads, and only the words per token are not those of a model.
    """

    def __init__(self, size: int = 32_000) -> None:
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    @property
    def special(self) -> frozenset[int]:
        return frozenset()

    def encode(self, text: str) -> list[int]:
        return [zlib.crc32(word.encode()) % self._size for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(f"w{token}" for token in ids)


def random_ids(vocabulary: Vocabulary, count: int, rng: Random) -> tuple[int, ...]:
    """``count`` ids, uniform over all that are text."""
    size, special = vocabulary.size, vocabulary.special
    found: list[int] = []
    while len(found) < count:
        found += [token for token in rng.choices(range(size), k=count - len(found)) if token not in special]
    return tuple(found)
