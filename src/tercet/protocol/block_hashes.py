"""Prompts as chains of block hashes. They identify blocks of simulated engines and of the router's prompt records."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

from tercet.protocol.content import MultiModalFeature

Extras = Mapping[int, tuple[int, ...]]
"""Content of blocks in addition to their tokens, by block number."""


def root_of(salt: str | None, adapter: str | None = None) -> int:
    """Return the hash that starts a chain. It differs between cache salts and adapters, so those share no blocks."""
    root = zlib.crc32(salt.encode()) + 1 if salt else 0
    return root if adapter is None else hash((root, zlib.crc32(adapter.encode()), len(adapter)))


def extra_of(digest: str, offset: int) -> tuple[int, int]:
    """Return the extra content of a block with a feature that begins ``offset`` tokens after the block's beginning."""
    return int(digest[:15], 16), offset


def extras_of(features: Iterable[MultiModalFeature], block_size: int) -> Extras:
    """Return the extra content of the blocks of a prompt with these features."""
    found: dict[int, tuple[int, ...]] = {}
    for feature in features:
        for block in range(feature.offset // block_size, (feature.end - 1) // block_size + 1):
            extra = extra_of(feature.digest, feature.offset - block * block_size)
            found[block] = (*found.get(block, ()), *extra)
    return found


def chain(
    parent: int, tokens: tuple[int, ...], block_size: int, limit: int | None = None, extras: Extras | None = None
) -> list[int]:
    """Return the hashes of the full blocks of ``tokens``, at most ``limit``, that follow the block ``parent``.

    Each hash covers all tokens before the end of its block.
    """
    blocks = len(tokens) // block_size if limit is None else min(limit, len(tokens) // block_size)
    begins = range(0, blocks * block_size, block_size)
    # Hashes of tuples of ints do not depend on PYTHONHASHSEED.
    if extras:
        numbered = enumerate(begins)
        return [
            parent := hash((parent, tokens[begin : begin + block_size], *extras.get(number, ())))
            for number, begin in numbered
        ]
    return [parent := hash((parent, tokens[begin : begin + block_size])) for begin in begins]
