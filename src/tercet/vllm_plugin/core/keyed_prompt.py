"""A prompt with all other inputs of its KV: the record that leases, sends and requests of one sequence share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec

from tercet.protocol import Content, MultiModalFeature, cache_key, content_of, digest_of_features, packed
from tercet.vllm_plugin.edge.adapters import Adapter, digest_of


class KeyedPrompt(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """Tokens, cache salt, LoRA adapter, and features (images and the like) without their data.

    It is made once, where a call arrives, and goes to the core in this form.
    """

    tokens: list[int]
    salt: str | None = None
    adapter: Adapter | None = None
    features: tuple[MultiModalFeature, ...] = ()

    @cached_property
    def key(self) -> str | None:
        """Key of all inputs of the KV except tokens."""
        return cache_key(self.salt, digest_of(self.adapter), digest_of_features(self.features))

    def difference(self, other: KeyedPrompt) -> str:
        """Return the name in calls of the field in which ``other`` differs; empty if at most the tokens differ."""
        # vLLM's cache treats an empty salt like None.
        if digest_of_features(self.features) != digest_of_features(other.features):
            return "mm_features"
        if self.adapter != other.adapter:
            return "adapter"
        return "cache_salt" if (self.salt or None) != (other.salt or None) else ""

    def content(self, end: int) -> Content:
        """Return the identity of the KV of the first ``end`` tokens."""
        return content_of(packed(self.tokens), self.key, end)

    def first(self, end: int) -> KeyedPrompt:
        """Return this prompt, cut after ``end`` tokens."""
        return msgspec.structs.replace(self, tokens=self.tokens[:end])

    def with_output(self, output: Sequence[int]) -> KeyedPrompt:
        """Return this prompt, followed by tokens that were already generated."""
        return msgspec.structs.replace(self, tokens=[*self.tokens, *output])
