"""The record of a prompt and everything else that its KV depends on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tercet.engine.interface import Adapter, KeyedPrompt
from tercet.protocol import MultiModalFeature, cache_key, content_of, digest_of_features, packed

from .tiny_engine import crossed, tokens_of

ADAPTER = Adapter("a", 1, "/a", "d" * 64)
FEATURES = (MultiModalFeature(modality="image", digest="e" * 64, offset=3, length=4),)
PROMPT = KeyedPrompt(tokens_of(40), "salt", ADAPTER, FEATURES)


def test_its_key_is_of_salt_adapter_and_images() -> None:
    assert PROMPT.key == cache_key("salt", ADAPTER.digest, digest_of_features(FEATURES))
    assert KeyedPrompt([1], "salt").key == "salt"
    assert KeyedPrompt([1]).key is None


def test_a_part_has_the_same_key_and_the_content_of_its_tokens() -> None:
    assert PROMPT.first(16).tokens == tokens_of(16)
    assert PROMPT.with_output([7, 8]).tokens == [*tokens_of(40), 7, 8]
    assert {PROMPT.first(16).key, PROMPT.with_output([7]).key} == {PROMPT.key}
    assert PROMPT.content(16) == PROMPT.first(16).content(16) == content_of(packed(tokens_of(16)), PROMPT.key)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"tokens": [1]}, ""),
        ({"salt": None}, "cache_salt"),
        ({"adapter": msgspec.structs.replace(ADAPTER, digest="f" * 64)}, "adapter"),
        ({"adapter": None}, "adapter"),
        ({"features": ()}, "mm_features"),
    ],
)
def test_what_differs_is_named_as_calls_name_it(changed: dict[str, Any], field: str) -> None:
    other = msgspec.structs.replace(PROMPT, **changed)
    assert PROMPT.difference(other) == other.difference(PROMPT) == field


def test_an_empty_salt_is_none() -> None:
    assert KeyedPrompt([1], "").difference(KeyedPrompt([1])) == ""


def test_the_core_gets_it_without_names_of_fields_and_without_the_key() -> None:
    assert PROMPT.key
    sent = crossed(PROMPT)
    assert isinstance(sent, list)
    assert len(sent) == 4
    assert msgspec.convert(sent, KeyedPrompt) == PROMPT
