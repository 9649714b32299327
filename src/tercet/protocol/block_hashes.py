"""Prompts as chains of block hashes: names of simulated engines' blocks, and what front doors remember of prompts."""

from __future__ import annotations

import zlib
from itertools import islice


def root_of(salt: str | None) -> int:
    """What a chain starts from: prompts with different cache salts share nothing."""
    return 0 if salt is None else zlib.crc32(salt.encode()) + 1


def chain(parent: int, tokens: tuple[int, ...], block_size: int, limit: int | None = None) -> list[int]:
    """The hashes of the full blocks of ``tokens``, at most ``limit`` of them, which follow the one called ``parent``.

    Each covers everything before it.
    """
    blocks = zip(*(iter(tokens),) * block_size, strict=False)
    if limit is not None:
        blocks = islice(blocks, limit)
    # Hashes of tuples of ints do not depend on PYTHONHASHSEED.
    return [parent := hash((parent, block)) for block in blocks]
