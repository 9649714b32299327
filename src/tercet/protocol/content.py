"""Whose KV it is: a short hash of tokens and of whatever else makes equal tokens have other KV.

A lease is for certain tokens, and so is each send into it: positions alone would let KV of one sequence be taken for
that of another.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated

import msgspec

TOKEN_BYTES = 4
DIGEST_BYTES = 16
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Content(msgspec.Struct, frozen=True, array_like=True):
    """The first ``end`` tokens of a sequence; ``digest`` covers them and the cache salt."""

    end: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    digest: Digest


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as what is hashed: four bytes each, little-endian."""
    found = array("I", tokens)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()


def content_of(tokens: bytes, salt: str | None, end: int | None = None) -> Content:
    """What KV of the first ``end`` of some :func:`packed` tokens is of, by default of all."""
    end = len(tokens) // TOKEN_BYTES if end is None else end
    # vLLM's cache knows no difference between an empty salt and none. A key has 64 bytes at most, a salt any number.
    key = blake2b(salt.encode()).digest() if salt else b""
    return Content(end, blake2b(memoryview(tokens)[: end * TOKEN_BYTES], digest_size=DIGEST_BYTES, key=key).digest())
