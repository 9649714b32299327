"""Images and other features of a prompt: the positions of their placeholder tokens, and the data that replaces these.

Two pictures have the same placeholder tokens, so code that compares prompts by tokens compares the digests of their
features, too. A digest covers the data that the model receives, not a name that a client chose. Engines check it
before they compute with a feature (:meth:`MultiModalFeature.require_genuine`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Annotated

import msgspec

from tercet.protocol.errors import BadRequest

DIGEST_HEX = 64
MOST_FEATURES = 1024


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
        if feature.offset < end:
            raise BadRequest("mm_features: offset: must be in the order of the prompt, and not overlap", "mm_features")
        end = feature.end
        if end > length:
            raise BadRequest(
                f"mm_features: a feature ends at token {end}, but the prompt has {length} tokens", "mm_features"
            )
        if feature.embeds and (len(feature.embeds) != feature.length or feature.embeds.strip(b"\0\1")):
            raise BadRequest("mm_features: embeds: must have one byte, 0 or 1, for each of its tokens", "mm_features")
