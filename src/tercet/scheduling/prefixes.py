"""Prompts as chains of block hashes: equal hashes mean equal tokens, from the first one on."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

from tercet.protocol import Request
from tercet.scheduling.engines import Integers

ROOT = 0


def next_hash(parent: int, tokens: tuple[int, ...]) -> int:
    """The hash of a block that follows the block with hash ``parent``."""
    return hash((parent, tokens))


def root_of(salt: str | None) -> int:
    """What a chain starts from: prompts with different cache salts share nothing."""
    return ROOT if salt is None else zlib.crc32(salt.encode()) + 1


def block_hashes(request: Request, block_size: int, limit: int | None = None) -> list[int]:
    """The hashes of a prompt's full blocks, at most ``limit`` of them."""
    prompt, parent = request.prompt, root_of(request.cache_salt)
    full = len(prompt) // block_size
    hashes: list[int] = []
    for begin in range(0, block_size * (full if limit is None else min(full, limit)), block_size):
        parent = next_hash(parent, prompt[begin : begin + block_size])
        hashes.append(parent)
    return hashes


class PrefixIndex(Protocol):
    """Which engine holds which blocks."""

    def matched(self, hashes: Sequence[int]) -> Integers:
        """By row: how many of the first blocks the engine holds, without a gap."""
        ...


class RoutedPrefixes(PrefixIndex, Protocol):
    """An index that knows only what was routed where."""

    def note(self, row: int, hashes: Sequence[int]) -> None:
        """These blocks are on their way to the engine in ``row``."""
        ...
