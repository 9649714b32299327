"""Names of blocks: equal for equal KV, and for nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tercet.engine.interface import Adapter, KeyedPrompt
from tercet.protocol import MultiModalFeature
from tercet.store.contents import contents_of

SIZE = 4
TOKENS = st.lists(st.integers(0, 2), max_size=20)


def names(prompt: KeyedPrompt) -> list[bytes]:
    return [each.name for each in contents_of(prompt, SIZE)]


def image(offset: int, digest: str = "a") -> MultiModalFeature:
    return MultiModalFeature(modality="image", digest=digest * 64, offset=offset, length=2)


@given(TOKENS, TOKENS)
def test_blocks_have_one_name_as_far_as_all_tokens_before_their_end_are_equal(one: list[int], other: list[int]) -> None:
    for at, (ours, theirs) in enumerate(zip(names(KeyedPrompt(one)), names(KeyedPrompt(other)), strict=False), 1):
        assert (ours == theirs) == (one[: at * SIZE] == other[: at * SIZE])


@given(TOKENS.filter(lambda tokens: len(tokens) >= SIZE))
def test_salt_and_adapter_are_in_the_names(tokens: list[int]) -> None:
    def adapted(digest: str) -> Adapter:
        return Adapter("fr", 1, "/x", digest)

    keyed = [
        KeyedPrompt(tokens),
        KeyedPrompt(tokens, "s"),
        KeyedPrompt(tokens, "t"),
        KeyedPrompt(tokens, None, adapted("1")),
        KeyedPrompt(tokens, None, adapted("2")),
        KeyedPrompt(tokens, "s", adapted("1")),
    ]
    every = [name for each in keyed for name in names(each)]
    assert len(set(every)) == len(every)
    assert names(KeyedPrompt(tokens, "")) == names(KeyedPrompt(tokens))


def test_images_are_in_the_names_of_their_blocks_and_of_those_after_them_only() -> None:
    tokens: Sequence[int] = range(16)

    def named(*features: MultiModalFeature) -> list[bytes]:
        return names(KeyedPrompt([*tokens], None, None, features))

    plain, one, other, moved, more = (
        named(),
        named(image(5)),
        named(image(5, "b")),
        named(image(6)),
        named(image(5), image(9)),
    )
    assert plain[0] == one[0] == other[0] == moved[0]
    assert len({each[1] for each in (plain, one, other, moved)}) == 4
    assert one[1] == more[1]
    assert one[2] != more[2]
    assert named(image(3))[0] != plain[0]  # it lies across the end of the first block


@given(TOKENS, st.none() | st.sampled_from(["", "salt"]))
def test_contents_prove_their_names(tokens: list[int], salt: str | None) -> None:
    prompt = KeyedPrompt(tokens, salt, None, (image(1),) if len(tokens) > 2 else ())
    for content in contents_of(prompt, SIZE):
        assert content.is_genuine
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(content), type=type(content))
        assert again == content
        assert again.is_genuine
        assert not msgspec.structs.replace(content, tokens=bytes([7]) + content.tokens[1:]).is_genuine
        assert not msgspec.structs.replace(content, features=(("a" * 64, 0), *content.features)).is_genuine
