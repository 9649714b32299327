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


# Salts of clients that begin like a key of ours get it twice.
MARK, OF_ADAPTER, OF_FEATURES = "\0", "\0a", "\0m"


class Content(msgspec.Struct, frozen=True, array_like=True):
    """The first ``end`` tokens of a sequence; ``digest`` covers them, the cache salt, the adapter, and images."""

    end: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    digest: Digest


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as what is hashed: four bytes each, little-endian."""
    found = array("I", tokens)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()


def cache_key(salt: str | None, adapter: str = "", features: str = "") -> str | None:
    """What beside the tokens KV is of, as one word that stands for no other.

    It is of a cache salt, an adapter's digest, and that of all images and the like of the sequence. Of the salt alone
    it is the salt, in all but those that look like one of these words.
    """
    if features:
        return f"{OF_FEATURES}{len(features)}:{features}{cache_key(salt, adapter) or ''}"
    salt = salt or None
    if adapter:
        return f"{OF_ADAPTER}{len(adapter)}:{adapter}{salt or ''}"
    return MARK + salt if salt is not None and salt.startswith(MARK) else salt


def content_of(tokens: bytes, salt: str | None, end: int | None = None) -> Content:
    """What KV of the first ``end`` of some :func:`packed` tokens is of, by default of all.

    ``salt`` is a :func:`cache_key`, where there are adapters.
    """
    end = len(tokens) // TOKEN_BYTES if end is None else end
    # vLLM's cache knows no difference between an empty salt and none. A key has 64 bytes at most, a salt any number.
    key = blake2b(salt.encode()).digest() if salt else b""
    return Content(end, blake2b(memoryview(tokens)[: end * TOKEN_BYTES], digest_size=DIGEST_BYTES, key=key).digest())
