"""A prompt with everything else that its KV depends on: what leases, sends and requests of one sequence agree on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec

from tercet.protocol import Content, MultiModalFeature, cache_key, content_of, digest_of_features, packed
from tercet.vllm_plugin.edge.adapters import Adapter, digest_of


class KeyedPrompt(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """Tokens, cache salt, LoRA adapter, and the images and the like, which have no data here.

    It is made once, where a call arrives, and goes from there to the core in this form.
    """

    tokens: list[int]
    salt: str | None = None
    adapter: Adapter | None = None
    features: tuple[MultiModalFeature, ...] = ()

    @cached_property
    def key(self) -> str | None:
        """Key of everything except tokens that the KV depends on."""
        return cache_key(self.salt, digest_of(self.adapter), digest_of_features(self.features))

    def difference(self, other: KeyedPrompt) -> str:
        """The field in which the other one differs, by its name in calls; empty if at most the tokens differ."""
        # vLLM's cache treats an empty salt as none.
        if digest_of_features(self.features) != digest_of_features(other.features):
            return "mm_features"
        if self.adapter != other.adapter:
            return "adapter"
        return "cache_salt" if (self.salt or None) != (other.salt or None) else ""

    def content(self, end: int) -> Content:
        """Identity of the KV of the first ``end`` tokens."""
        return content_of(packed(self.tokens), self.key, end)

    def first(self, end: int) -> KeyedPrompt:
        """This prompt, cut after ``end`` tokens."""
        return msgspec.structs.replace(self, tokens=self.tokens[:end])

    def with_output(self, output: Sequence[int]) -> KeyedPrompt:
        """This prompt, followed by tokens that were generated already."""
        return msgspec.structs.replace(self, tokens=[*self.tokens, *output])
