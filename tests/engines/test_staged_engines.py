"""KV that is reached through buffers in host memory, as an accelerator's is: host memory is in the device's role here.

Between such engines, whatever their tensor-parallel degrees, and for requests that move while they run. One that cuts
blocks between tokens, as engines on CPUs do that read KV where it lies, is told why they cannot exchange any.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tercet.protocol import LayoutMismatch
from tercet.wire.client import HttpEngine
from tests.long_runs import in_full
from tests.small_llama import small_llama

from .conftest import Fleet, places_of, router_over, settled
from .moving import answer_of, moving
from .prompts import complete, prompt_of
from .unlike import engines_with, hand_over, require_same_tokens

pytestmark = pytest.mark.verifies("KV through buffers", transport="tcp")

STAGED = ("--kv-transfer-config", json.dumps({"kv_connector_extra_config": {"kv_memory": "staged"}}))
FLAGS = {
    "plain": ("0",),
    "staged": ("0", *STAGED),
    "staged_too": ("1", *STAGED),
    "split": ("0|1", "--tensor-parallel-size", "2", *STAGED),
}
PAIRS = [("staged", "staged_too"), ("staged", "split"), ("split", "staged")]
# Within a block, at its end, behind it, over several of them, and in several steps.
LENGTHS = (1, 128, 129, 300, 1100)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The engines' URLs, by their names in FLAGS."""
    with engines_with(FLAGS, str(small_llama()), tmp_path_factory.mktemp("staged")) as found:
        yield found


@pytest.mark.parametrize(("source", "target"), PAIRS)
async def test_same_tokens_as_one_engine(urls: dict[str, str], source: str, target: str) -> None:
    await require_same_tokens(urls[source], urls[target], urls["plain"], LENGTHS)


@pytest.mark.parametrize(("source", "target"), [("staged", "plain"), ("plain", "staged")])
async def test_engines_that_cut_blocks_are_refused(urls: dict[str, str], source: str, target: str) -> None:
    async with HttpEngine(source, urls[source]) as sender, HttpEngine(target, urls[target]) as receiver:
        with pytest.raises(LayoutMismatch, match="splits_by_token"):
            await hand_over(sender, receiver, prompt_of(300), uuid.uuid4().hex)
        await settled(sender)
        await settled(receiver)


@in_full("hand-overs between staged engines in this file; moves of engines of one stage in test_moves")
async def test_requests_that_move_answer_as_if_they_had_stayed(urls: dict[str, str], tmp_path: Path) -> None:
    engines = {"prefill-0": urls["staged"], "decode-0": urls["staged_too"]}
    with router_over(engines, tmp_path) as url:
        fleet = Fleet(url, places_of(url, tmp_path))
        long: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}
        prompts = [prompt_of(300, seed=seed) for seed in range(3)]
        calm = [await complete(url, prompt, cache_salt=uuid.uuid4().hex, **long) for prompt in prompts]
        async with moving(fleet) as moved:
            asked = (complete(url, prompt, cache_salt=uuid.uuid4().hex, **long) for prompt in prompts)
            answers = await asyncio.gather(*asked)
        assert [answer_of(each) for each in answers] == [answer_of(each) for each in calm]
        assert len(moved) >= 2
    for name, engine_url in engines.items():
        async with HttpEngine(name, engine_url) as engine:
            await settled(engine)
