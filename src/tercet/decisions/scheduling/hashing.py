"""Block hashes of prompts, and consistent hashing of sessions."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from tercet.protocol import Request
from tercet.protocol.block_hashes import chain, extras_of, root_of


def block_hashes(request: Request, block_size: int, limit: int | None = None) -> list[int]:
    """Return the hashes of a prompt's full blocks, at most ``limit`` of them."""
    extras = extras_of(request.mm_features, block_size) if request.mm_features else None
    return chain(root_of(request.cache_salt, request.adapter), request.prompt, block_size, limit, extras)


def key_of(name: str) -> int:
    """Return a 64-bit hash of a name, equal in every process."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def preference(session: str, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a session's preference for each engine (``keys``, from :func:`key_of`); the highest one wins.

    An engine that joins or leaves does not change the order of the others.
    """
    mixed = keys ^ np.uint64(key_of(session))
    # The finalizer of SplitMix64: each bit of the input changes half of the output's bits.
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
