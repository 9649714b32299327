"""Images and the like in a prompt: where their placeholder tokens are, and what stands there instead of them.

The placeholder tokens of two pictures are the same, so whatever goes by a prompt's tokens goes by the digests of its
features, too. A digest is of what the model is given, not of a name that somebody chose: who computes with a feature
has checked it (:meth:`MultiModalFeature.require_genuine`).
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
    """One image, sound or video of a prompt, processed.

    ``[offset, offset + length)`` are the positions of its placeholder tokens. ``embeds`` has a byte for each, which is
    1 where the model is given an embedding and 0 where it is given the token; empty if it is 1 everywhere. ``data`` are
    the processor's tensors, encoded as vLLM encodes them; empty where nothing is computed of it.
    """

    modality: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    offset: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    length: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    embeds: bytes = b""
    data: bytes = b""

    @property
    def end(self) -> int:
        """The position behind its placeholder tokens."""
        return self.offset + self.length

    def require_genuine(self) -> None:
        """Raise :class:`~tercet.protocol.errors.BadRequest` unless the data is there, and what the digest is of."""
        if not self.data:
            raise BadRequest("mm_features: data: is missing, and what computes a feature needs it", "mm_features")
        if digest_of_feature(self.modality, self.length, self.embeds, self.data) != self.digest:
            raise BadRequest("mm_features: digest: is not that of the data", "mm_features")

    def without_data(self) -> MultiModalFeature:
        """What names its KV."""
        return msgspec.structs.replace(self, data=b"")


MultiModalFeatures = Annotated[tuple[MultiModalFeature, ...], msgspec.Meta(max_length=MOST_FEATURES)]


def digest_of_feature(modality: str, length: int, embeds: bytes, data: bytes) -> str:
    """What stands for a feature wherever it is in a prompt."""
    found = blake2b(f"{modality}\0{length}\0{len(embeds)}\0".encode(), digest_size=DIGEST_HEX // 2)
    found.update(embeds)
    found.update(data)
    return found.hexdigest()


def digest_of_features(features: Iterable[MultiModalFeature]) -> str:
    """What stands for all features of a prompt and for where they are; empty if there are none."""
    placed = [(feature.digest, feature.offset, feature.length) for feature in features]
    return blake2b(repr(placed).encode(), digest_size=DIGEST_HEX // 2).hexdigest() if placed else ""


def whole_features(features: Iterable[MultiModalFeature], end: int) -> int:
    """How many tokens to compute for KV of the first ``end``: features are not cut.

    Their tokens may look at each other both ways, and of models that want them in one step vLLM waits for all.
    """
    return next((feature.end for feature in features if feature.offset < end < feature.end), end)


def require_placed(features: Sequence[MultiModalFeature], length: int) -> None:
    """Refuse features that do not lie one behind another in a prompt of ``length`` tokens.

    Raises :class:`~tercet.protocol.errors.BadRequest`.
    """
    end = 0
    for feature in features:
        if feature.offset < end:
            raise BadRequest("mm_features: offset: must be in the order of the prompt, and not overlap", "mm_features")
        end = feature.end
        if end > length:
            raise BadRequest(f"mm_features: ends at {end}, past a prompt of {length} tokens", "mm_features")
        if feature.embeds and (len(feature.embeds) != feature.length or feature.embeds.strip(b"\0\1")):
            raise BadRequest("mm_features: embeds: must have a 0 or 1 for each of its tokens", "mm_features")
