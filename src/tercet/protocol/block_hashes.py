"""Prompts as chains of block hashes: names of simulated engines' blocks, and what front doors remember of prompts."""

from __future__ import annotations

import zlib


def root_of(salt: str | None, adapter: str | None = None) -> int:
    """What a chain starts from: prompts with different cache salts, or for different adapters, share nothing."""
    root = zlib.crc32(salt.encode()) + 1 if salt else 0
    return root if adapter is None else hash((root, zlib.crc32(adapter.encode()), len(adapter)))


def chain(parent: int, tokens: tuple[int, ...], block_size: int, limit: int | None = None) -> list[int]:
    """The hashes of the full blocks of ``tokens``, at most ``limit`` of them, which follow the one called ``parent``.

    Each covers everything before it.
    """
    blocks = len(tokens) // block_size if limit is None else min(limit, len(tokens) // block_size)
    begins = range(0, blocks * block_size, block_size)
    # Hashes of tuples of ints do not depend on PYTHONHASHSEED.
    return [parent := hash((parent, tokens[begin : begin + block_size])) for begin in begins]
