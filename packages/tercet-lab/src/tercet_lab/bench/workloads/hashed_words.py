"""A vocabulary without a model, for simulations."""

from __future__ import annotations

import zlib
from collections.abc import Sequence


class HashedWords:
    """A vocabulary without a model: the id of each word is its CRC-32, modulo the size.

    Equal texts have equal ids, so prefixes match as with a real tokenizer. Workloads have exact lengths in tokens; only
    the number of words per token differs from that of a model.
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
