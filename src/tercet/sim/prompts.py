"""What a simulated model says, and the hashes under which its KV is cached. Both follow from the prompt alone.

So two engines agree on a sequence's tokens wherever it runs, as real ones do at temperature zero.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from tercet.protocol import Content, content_of, packed
from tercet.protocol.block_hashes import chain, root_of

# Output tokens are a walk through one fixed table: a batch of them is a slice, made only when somebody reads it.
_CYCLE = 8192
VOCABULARY = 32_000


def _table() -> tuple[int, ...]:
    state, tokens = 1, array("i")
    for _ in range(_CYCLE):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        tokens.append((state >> 33) % VOCABULARY)
    return tuple(tokens)


_TOKENS = _table() * 2


class Prompt:
    """A prompt's token ids with what engines derive from them, computed once and shared by all of them."""

    __slots__ = ("_cache_salt", "_contents", "_hashes", "_root", "_start", "tokens")

    def __init__(self, tokens: tuple[int, ...], cache_salt: str | None) -> None:
        self.tokens = tokens
        self._cache_salt = cache_salt
        self._contents: dict[int, Content] = {}
        self._root = root_of(cache_salt)
        self._start: int | None = None
        self._hashes: dict[int, list[int]] = {}

    def output(self, begin: int, end: int) -> tuple[int, ...]:
        """The output tokens ``[begin, end)``, counted from the prompt's end."""
        if self._start is None:
            self._start = hash(self.tokens)
        start = (self._start + begin) % _CYCLE
        if end - begin <= _CYCLE:
            return _TOKENS[start : start + end - begin]
        return tuple(_TOKENS[(start + i) % _CYCLE] for i in range(end - begin))

    def has_salt(self, cache_salt: str | None) -> bool:
        """Whether it is under this cache salt; an empty one is none."""
        return (self._cache_salt or None) == (cache_salt or None)

    def content(self, end: int) -> Content:
        """What KV of the first ``end`` tokens is of; of fewer, if the prompt has no more."""
        found = self._contents.get(end)
        if found is None:
            found = self._contents[end] = content_of(packed(self.tokens[:end]), self._cache_salt)
        return found

    def hashes(self, block_size: int) -> list[int]:
        """One hash for each full block of the prompt; each covers everything before it and the cache salt."""
        found = self._hashes.get(block_size)
        if found is None:
            found = self._hashes[block_size] = chain(self._root, self.tokens, block_size)
        return found

    def hashes_with(self, output: Sequence[int], block_size: int) -> list[int]:
        """The hashes of the full blocks of ``prompt + output``."""
        known = self.hashes(block_size)
        if not output:
            return known
        rest = (*self.tokens[len(known) * block_size :], *output)
        return known + chain(known[-1] if known else self._root, rest, block_size)


class Prompts:
    """The prompts seen last, ``kept`` of them, by identity: the verbs of one request name one tuple."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        # No plain dict: finding the first key of one that loses its first keys walks over all that were lost.
        self._known = OrderedDict[tuple[int, str | None], Prompt]()

    def get(self, tokens: tuple[int, ...], cache_salt: str | None) -> Prompt:
        """The facts about these token ids."""
        key = (id(tokens), cache_salt)
        found = self._known.get(key)
        # The table holds the tuple, so an id in it is not given to another one.
        if found is None:
            if len(self._known) >= self._kept:
                self._known.popitem(last=False)
            found = self._known[key] = Prompt(tokens, cache_salt)
        return found
