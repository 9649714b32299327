"""Conversion of features (images and the like) between vLLM's form and Tercet's.

Relies on ``MsgpackEncoder`` putting every tensor that is smaller than its threshold into the message itself, and on
``MsgpackDecoder`` reading a ``MultiModalKwargsItem`` back; on ``PlaceholderRange.is_embed`` being a mask of tokens; on
``mm_input`` making the form in which ``AsyncLLM`` accepts a processed prompt; and on vLLM naming a feature's KV, and
its encoder's result, by ``identifier``, which ``InputProcessor`` makes from ``mm_hashes``. Tercet's hashes are digests
of the data, so a feature has the same name on every engine, and clients cannot choose it. In vLLM's caches it has the
``uuid`` that its client gave, if any, which relies on a renderer passing all of these through ``_process_mm_uuids``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.inputs import mm_input
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.utils.jsontree import json_map_leaves
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tercet.protocol import BadRequest, MultiModalFeature, digest_of_feature
from tercet.protocol.names import kept_name

# Larger than any tensor: all tensors are inside the message.
INLINE = 2**62
# Types with fewer bytes than float32, in which processors make their tensors.
SHORT = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def to_wire(spec: MultiModalFeatureSpec, model_dtype: str = "") -> MultiModalFeature:
    """Return a feature for engines. Raises ``ValueError`` for a feature whose data is missing here.

    Engines cast the data to ``model_dtype``, in which they compute. If that type is shorter, the data is cast before it
    is sent, and the digest is that of the sent data.
    """
    if spec.data is None:
        raise ValueError("the data of a feature is missing")
    item = _cast(spec.data, SHORT[model_dtype]) if model_dtype in SHORT else spec.data
    (encoded,) = MsgpackEncoder(size_threshold=INLINE).encode(item)  # one buffer, which does not belong to torch
    place, mask = spec.mm_position, spec.mm_position.is_embed
    embeds = b"" if mask is None else bytes(mask.to(torch.uint8).tolist())
    data = bytes(memoryview(encoded))  # type: ignore[arg-type]
    digest = digest_of_feature(spec.modality, place.length, embeds, data)
    return MultiModalFeature(
        modality=spec.modality, digest=digest, offset=place.offset, length=place.length, embeds=embeds, data=data
    )


def to_prompt(
    tokens: list[int], features: Sequence[MultiModalFeature], cache_salt: str | None, dtype: torch.dtype
) -> Any:  # fmt: skip
    """Return a prompt for ``AsyncLLM``, with its features as ``dtype``. Raises ``BadRequest`` for invalid data."""
    items: dict[str, list[MultiModalKwargsItem | None]] = {}
    hashes: dict[str, list[str]] = {}
    places: dict[str, list[PlaceholderRange]] = {}
    for feature in features:
        if feature.offset >= len(tokens):
            break
        feature.require_genuine()
        try:
            item = _cast(MsgpackDecoder(MultiModalKwargsItem).decode(feature.data), dtype)
        except Exception as error:  # vLLM's decoder and torch may raise anything
            raise BadRequest(f"mm_features: data: cannot be read: {error}", "mm_features") from error
        items.setdefault(feature.modality, []).append(item)
        hashes.setdefault(feature.modality, []).append(feature.digest)
        places.setdefault(feature.modality, []).append(_place_of(feature))
    return mm_input(
        prompt_token_ids=tokens,
        mm_kwargs=MultiModalKwargsItems(items),  # type: ignore[arg-type]
        mm_hashes=hashes,
        mm_placeholders=places,
        cache_salt=cache_salt,
    )


def to_specs(features: Sequence[MultiModalFeature], end: int) -> list[MultiModalFeatureSpec]:
    """Return features without data; they identify the KV of the first ``end`` tokens."""
    return [
        MultiModalFeatureSpec(None, feature.modality, feature.digest, _place_of(feature), feature.digest)
        for feature in features
        if feature.offset < end
    ]


def with_short_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return clients' names of features as they are kept: vLLM's caches do not count the bytes of names."""
    return {
        modality: None if names is None else [None if name is None else kept_name(name) for name in names]
        for modality, names in given.items()
    }


def bound_uuids(renderer: Any) -> None:
    """Make an engine's ``renderer`` use the names that clients give to features as :func:`with_short_names`."""
    processed = renderer._process_mm_uuids
    renderer._process_mm_uuids = lambda *given: with_short_names(processed(*given))


def _place_of(feature: MultiModalFeature) -> PlaceholderRange:
    mask = torch.tensor(list(feature.embeds), dtype=torch.bool) if feature.embeds else None
    return PlaceholderRange(feature.offset, feature.length, mask)


def _cast(item: MultiModalKwargsItem, dtype: torch.dtype) -> MultiModalKwargsItem:
    """Return the item, with its floating-point tensors cast to ``dtype``."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    elements = {key: (element, json_map_leaves(cast, element.data)) for key, element in item.items()}
    return MultiModalKwargsItem(
        {key: dataclasses.replace(element, data=data) for key, (element, data) in elements.items()}
    )  # fmt: skip
