"""Identity of KV: a short hash of its tokens, and of all else that changes the KV of equal tokens.

A lease is for certain tokens, and so is each send under it. With positions alone, KV of one sequence could be taken
for KV of another.

Two pictures have the same placeholder tokens, so code that compares prompts by tokens compares the digests of their
features, too. A digest covers the data that the model receives, not a name that a client chose. Engines check it
before they compute with a feature (:meth:`MultiModalFeature.require_genuine`).

Chains of block hashes (:func:`chain`) identify blocks of simulated engines and of the router's prompt records.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Protocol

import msgspec

from tercet.protocol.errors import BadRequest

DIGEST_HEX = 64
MOST_FEATURES = 1024
TOKEN_BYTES = 4
DIGEST_BYTES = 16
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
# A client's salt that begins with this mark gets the mark twice.
MARK, OF_ADAPTER, OF_FEATURES = "\0", "\0a", "\0m"
Extras = Mapping[int, tuple[int, ...]]
"""Content of blocks in addition to their tokens, by block number."""


class MultiModalFeature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One processed image, sound or video of a prompt.

    ``[offset, offset + length)`` are the positions of its placeholder tokens. ``embeds`` has one byte per position: 1
    where the model receives an embedding, 0 where it receives the token; empty if all are 1. ``data`` are the
    processor's tensors, encoded as vLLM encodes them; empty where the feature is not computed.
    """

    modality: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    offset: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    length: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    embeds: bytes = b""
    data: bytes = b""

    @property
    def end(self) -> int:
        """The position after its last placeholder token."""
        return self.offset + self.length

    def require_genuine(self) -> None:
        """Raise :class:`~tercet.protocol.errors.BadRequest` unless the data is present and matches the digest."""
        if not self.data:
            raise BadRequest("mm_features: data: is missing; an engine needs it to compute the feature", "mm_features")
        if digest_of_feature(self.modality, self.length, self.embeds, self.data) != self.digest:
            raise BadRequest("mm_features: digest: does not match the data", "mm_features")

    def without_data(self) -> MultiModalFeature:
        """Return a copy without data, which is enough to identify the feature's KV."""
        return msgspec.structs.replace(self, data=b"")


MultiModalFeatures = Annotated[tuple[MultiModalFeature, ...], msgspec.Meta(max_length=MOST_FEATURES)]


def digest_of_feature(modality: str, length: int, embeds: bytes, data: bytes) -> str:
    """Return a digest that identifies a feature at any position of a prompt."""
    found = blake2b(f"{modality}\0{length}\0{len(embeds)}\0".encode(), digest_size=DIGEST_HEX // 2)
    found.update(embeds)
    found.update(data)
    return found.hexdigest()


def digest_of_features(features: Iterable[MultiModalFeature]) -> str:
    """Return a digest that identifies all features of a prompt and their positions; empty without features."""
    placed = [(feature.digest, feature.offset, feature.length) for feature in features]
    return blake2b(repr(placed).encode(), digest_size=DIGEST_HEX // 2).hexdigest() if placed else ""


def whole_features(features: Iterable[MultiModalFeature], end: int) -> int:
    """Return the number of tokens to compute for the KV of the first ``end`` tokens: features are not cut."""
    return next((feature.end for feature in features if feature.offset < end < feature.end), end)


def require_placed(features: Sequence[MultiModalFeature], length: int) -> None:
    """Raise :class:`~tercet.protocol.errors.BadRequest` unless features are ordered, apart, and within ``length``."""
    end = 0
    for feature in features:
        # Placeholders of two features that overlap would be filled twice.
        if feature.offset < end:
            raise BadRequest("mm_features: offset: must be in the order of the prompt, and not overlap", "mm_features")
        end = feature.end
        if end > length:
            raise BadRequest(
                f"mm_features: a feature ends at token {end}, but the prompt has {length} tokens", "mm_features"
            )
        if feature.embeds and (len(feature.embeds) != feature.length or feature.embeds.strip(b"\0\1")):
            raise BadRequest("mm_features: embeds: must have one byte, 0 or 1, for each of its tokens", "mm_features")


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


class HashedTokens(Protocol):
    """Tokens that need not be made to know the hashes of their blocks."""

    def __len__(self) -> int: ...

    def hashes(self, block_size: int, blocks: int) -> Sequence[int]:
        """Return the hashes of the tuples of the first ``blocks`` blocks."""
        ...


def chain(
    parent: int, tokens: tuple[int, ...] | HashedTokens, block_size: int, limit: int | None = None,
    extras: Extras | None = None,
) -> list[int]:  # fmt: skip
    """Return the hashes of the full blocks of ``tokens``, at most ``limit``, that follow the block ``parent``.

    Each hash covers all tokens before the end of its block.
    """
    # The last block of a prompt is mostly not full, and no cache has such blocks.
    blocks = len(tokens) // block_size if limit is None else min(limit, len(tokens) // block_size)
    # Hashes of tuples of ints do not depend on PYTHONHASHSEED.
    if isinstance(tokens, tuple):
        own = [hash(tokens[begin : begin + block_size]) for begin in range(0, blocks * block_size, block_size)]
    else:
        own = tokens.hashes(block_size, blocks)
    if extras:
        return [parent := hash((parent, each, *extras.get(number, ()))) for number, each in enumerate(own)]
    return [parent := hash((parent, each)) for each in own]
