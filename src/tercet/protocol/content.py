"""Identity of KV: a short hash of its tokens, and of all else that changes the KV of equal tokens.

A lease is for certain tokens, and so is each send under it. With positions alone, KV of one sequence could be taken
for KV of another.
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


# A client's salt that begins with this mark gets the mark twice.
MARK, OF_ADAPTER, OF_FEATURES = "\0", "\0a", "\0m"


class Content(msgspec.Struct, frozen=True, array_like=True):
    """The first ``end`` tokens of a sequence; ``digest`` covers them, the cache salt, the adapter, and the images."""

    end: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    digest: Digest


def packed(tokens: Sequence[int]) -> bytes:
    """Return token ids in the form that is hashed: four bytes each, little-endian."""
    found = array("I", tokens)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()


def unpacked(tokens: bytes) -> Sequence[int]:
    """Return the token ids of a :func:`packed` text."""
    found = array("I", tokens)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def cache_key(salt: str | None, adapter: str = "", features: str = "") -> str | None:
    """Return a key of all that KV depends on except tokens, as one unambiguous text; None if there is nothing.

    It combines a cache salt, an adapter's digest, and the digest of the sequence's images and other features. With a
    salt alone the key is the salt itself, except for a salt that looks like a combined key.
    """
    if features:
        return f"{OF_FEATURES}{len(features)}:{features}{cache_key(salt, adapter) or ''}"
    salt = salt or None
    if adapter:
        return f"{OF_ADAPTER}{len(adapter)}:{adapter}{salt or ''}"
    return MARK + salt if salt is not None and salt.startswith(MARK) else salt


def content_of(tokens: bytes, salt: str | None, end: int | None = None) -> Content:
    """Return the content of the KV of the first ``end`` of some :func:`packed` tokens, by default of all.

    ``salt`` is the cache salt or a :func:`cache_key`.
    """
    end = len(tokens) // TOKEN_BYTES if end is None else end
    # vLLM's cache treats an empty salt as no salt. A key has at most 64 bytes, a salt may have any length.
    key = blake2b(salt.encode()).digest() if salt else b""
    return Content(end, blake2b(memoryview(tokens)[: end * TOKEN_BYTES], digest_size=DIGEST_BYTES, key=key).digest())
