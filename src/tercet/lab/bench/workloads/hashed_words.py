"""A vocabulary without a model, for simulations."""

from __future__ import annotations

import zlib
from collections.abc import Sequence


class HashedWords:
    """A vocabulary without a model: each word has the id that its CRC-32 gives it.

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
