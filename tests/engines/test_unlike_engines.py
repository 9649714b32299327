"""KV between engines that differ: in their tensor-parallel degree, in their block size, in both.

A small model with random weights, since SmolLM2 has three KV heads, which two ranks cannot share.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tercet.wire.client import HttpEngine
from tests.small_llama import small_llama

from .prompts import complete, prompt_of, tokens_of
from .unlike import engines_with, hand_over, require_same_tokens

pytestmark = pytest.mark.verifies("other degrees and block sizes")

FLAGS = {"whole": ("0",), "split": ("0|1", "--tensor-parallel-size", "2"), "small_blocks": ("1", "--block-size", "64")}
PAIRS = [(source, target) for source in FLAGS for target in FLAGS if source != target]
LENGTHS = (1, 64, 65, 129, 300)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The engines' URLs, by their names in FLAGS."""
    with engines_with(FLAGS, str(small_llama()), tmp_path_factory.mktemp("unlike")) as found:
        yield found


@pytest.mark.parametrize(("source", "target"), PAIRS)
async def test_same_tokens_as_one_engine(urls: dict[str, str], source: str, target: str) -> None:
    await require_same_tokens(urls[source], urls[target], urls["whole"], LENGTHS)


@pytest.mark.parametrize(("source", "target"), PAIRS)
async def test_only_what_is_missing_arrives(urls: dict[str, str], source: str, target: str) -> None:
    """What the receiver's cache has need not end where the sender's blocks do."""
    salt, prompt = uuid.uuid4().hex, prompt_of(350, seed=21)
    async with HttpEngine(source, urls[source]) as sender, HttpEngine(target, urls[target]) as receiver:
        await hand_over(sender, receiver, prompt[:200], salt)
        tokens, received = await hand_over(sender, receiver, prompt, salt)
        block_size = (await receiver.status()).block_size
    alone = await complete(urls["whole"], prompt, cache_salt=uuid.uuid4().hex, ignore_eos=True)
    assert tokens == tokens_of(alone)
    assert received == len(prompt) - 200 // block_size * block_size
