"""Two engines of a small random model, on one device or two: tokens are those of one engine alone. `make test-gpu`.

Starting an engine takes a minute or two.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
import uuid
from collections.abc import Generator, Sequence
from contextlib import ExitStack

import pytest
from scripts.gpu_report import random_model, servers

from tercet.protocol import Request
from tercet.wire.client import HttpEngine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]
TOKENS = 40
# Little of the device for each, so that both have room on one.
FLAGS = ("--gpu-memory-utilization", "0.3", "--max-model-len", "4096", "--max-num-seqs", "16")
# More of vLLM's flags, for a machine on which it does not run without (`--enforce-eager`).
MORE = tuple(shlex.split(os.environ.get("TEST_VLLM_FLAGS", "")))
STAGED = ("--kv-transfer-config", json.dumps({"kv_connector_extra_config": {"kv_memory": "staged"}}))
# Within a block, at its end, behind it, over many, and in several steps (chunked).
LENGTHS = (3, 16, 17, 300, 3000)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Generator[dict[str, str]]:
    """An engine that sends, one that maps its memory, and one that takes KV through buffers."""
    model = str(random_model.make(tmp_path_factory.mktemp("model")))
    kinds = {"sender": (), "receiver": (), "staged": STAGED}
    with ExitStack() as running:
        yield {
            name: running.enter_context(
                servers.engine(model, [*FLAGS, *MORE, "--max-num-batched-tokens", "1024", *more])
            )
            for name, more in kinds.items()
        }


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(200), k=length))


def request_of(prompt: Sequence[int], salt: str) -> Request:
    return Request(
        seq_id=uuid.uuid4().hex,
        prompt=tuple(prompt),
        cache_salt=salt,
        sampling_params={"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True},
    )


async def alone(url: str, prompt: Sequence[int], salt: str = "") -> list[int]:
    async with HttpEngine("alone", url) as engine:
        request = request_of(prompt, salt or uuid.uuid4().hex)
        return [token async for output in engine.start_generate(request) for token in output.token_ids]


async def handed_over(source: str, target: str, prompt: Sequence[int], salt: str) -> tuple[list[int], str]:
    """Prefilled on one and decoded on the other: the tokens, and which way KV went."""
    async with HttpEngine("source", source) as sender, HttpEngine("target", target) as receiver:
        request = request_of(prompt, salt)
        async with receiver.prep_recv(request) as space:
            sent = await sender.remote_send(request, space, space.matched_len, sample=True)
            assert sent.first is not None
            tokens = [*sent.first.token_ids]
            async for output in receiver.start_generate(request, sent.end, sent.first.token_ids):
                tokens += output.token_ids
        return tokens, sent.transport


@pytest.mark.verifies("a pair gives one engine's tokens", transport="{way}")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("target", "way"), [("receiver", "ipc"), ("staged", "tcp")])
def test_tokens_are_those_of_one_engine(urls: dict[str, str], target: str, way: str, length: int) -> None:
    """`ipc` takes devices that see each other: on one device, or two that are linked."""
    prompt = prompt_of(length, length)
    expected = asyncio.run(alone(urls["sender"], prompt))
    tokens, transport = asyncio.run(handed_over(urls["sender"], urls[target], prompt, uuid.uuid4().hex))
    assert tokens == expected
    assert transport == way


def test_what_a_full_graph_has_computed_arrives(urls: dict[str, str]) -> None:
    """One token behind blocks that are cached: a step like those that decode, of which no layer tells anything.

    In bfloat16 such a step is not equal, bit by bit, to a prefill of the whole prompt. So the engine that is alone also
    has the blocks cached.
    """
    salt, prompt = uuid.uuid4().hex, prompt_of(257, 1)
    asyncio.run(handed_over(urls["sender"], urls["receiver"], prompt[:256], salt))
    tokens, _ = asyncio.run(handed_over(urls["sender"], urls["receiver"], prompt, salt))
    of_one = uuid.uuid4().hex
    asyncio.run(alone(urls["sender"], prompt[:256], of_one))
    assert tokens == asyncio.run(alone(urls["sender"], prompt, of_one))


def test_many_at_once(urls: dict[str, str]) -> None:
    """Steps that decode and prefill together, copies in flight meanwhile, and blocks that are used again and again.

    Rows of a batch are not computed bit by bit as a row alone is: most answers are the same.
    """
    prompts = [prompt_of(200 + 50 * number, 1000 + number) for number in range(12)]

    async def all_of_them() -> list[tuple[list[int], str]]:
        one = (handed_over(urls["sender"], urls["receiver"], each, uuid.uuid4().hex) for each in prompts)
        return await asyncio.gather(*one)

    expected = [asyncio.run(alone(urls["sender"], each)) for each in prompts]
    for _ in range(3):
        found = asyncio.run(all_of_them())
        same = sum(tokens[:8] == wanted[:8] for (tokens, _), wanted in zip(found, expected, strict=True))
        assert same >= len(prompts) - 2
