"""The answers of a simulated model, which depend on the prompt and the adapter only.

Two engines therefore compute the same tokens for a sequence, as real engines do at temperature zero.
"""

from __future__ import annotations

import zlib
from array import array

from tercet.protocol import Content, cache_key, content_of, packed

# Output tokens come from one fixed table, in order: a batch of them is a slice, which is made only when it is read.
_CYCLE = 8192
# The start in the table depends on the length of the prompt and on its last tokens.
_READ = 64
VOCABULARY = 32_000


def _table() -> tuple[int, ...]:
    state, tokens = 1, array("i")
    for _ in range(_CYCLE):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        tokens.append((state >> 33) % VOCABULARY)
    return tuple(tokens)


_TOKENS = _table() * 2


class Prompt:
    """A prompt's token ids with the output for them, under an adapter or without one."""

    __slots__ = ("_contents", "_start", "adapter", "cache_salt", "tokens")

    def __init__(self, tokens: tuple[int, ...], cache_salt: str | None, adapter: str | None = None) -> None:
        self.tokens = tokens
        self.adapter = adapter
        self.cache_salt = cache_salt
        self._contents: dict[int, Content] | None = None
        self._start: int | None = None

    def output(self, begin: int, end: int) -> tuple[int, ...]:
        """Return the output tokens ``[begin, end)``, counted from the end of the prompt."""
        if self._start is None:
            weights = 0 if self.adapter is None else zlib.crc32(self.adapter.encode()) + 1
            self._start = hash((len(self.tokens), self.tokens[-_READ:])) + weights
        start = (self._start + begin) % _CYCLE
        if end - begin <= _CYCLE:
            return _TOKENS[start : start + end - begin]
        return tuple(_TOKENS[(start + i) % _CYCLE] for i in range(end - begin))

    def known(self, begin: int, end: int) -> tuple[int, ...]:
        """Return the tokens ``[begin, end)`` of the prompt followed by its output."""
        length = len(self.tokens)
        if end <= length:
            return self.tokens[begin:end]
        return self.tokens[begin:] + self.output(max(0, begin - length), end - length)

    def has_salt(self, cache_salt: str | None) -> bool:
        """True if the prompt has this cache salt. An empty salt equals None."""
        return (self.cache_salt or None) == (cache_salt or None)

    def begins_like(self, other: Prompt, end: int) -> bool:
        """True if this prompt and ``other`` have the same KV for their first ``end`` tokens."""
        alike = self.tokens is other.tokens or self.tokens[:end] == other.tokens[:end]
        return alike and self.has_salt(other.cache_salt) and self.adapter == other.adapter

    def content(self, end: int) -> Content:
        """Return the identity of the KV of the first ``end`` tokens, or of all tokens if the prompt is shorter."""
        known = self._contents = self._contents or {}
        if end not in known:
            known[end] = content_of(packed(self.tokens[:end]), cache_key(self.cache_salt, self.adapter or ""))
        return known[end]
