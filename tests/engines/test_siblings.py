"""Engines with other KV connectors: tokens of one engine alone through sends, moves, and hits of a tier or a disk.

`prefill-0` has vLLM's OffloadingConnector with a tier in host memory, or with its tier of files below a small one.
`decode-0` has its ExampleConnector, which writes and loads whole prompts within a step.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tercet.fleet import EngineFleet, FleetView, Member, Trace
from tercet.programs import load_program, outputs_of
from tercet.protocol import Request
from tercet.wire.client import HttpEngine
from tests.host_tier import offloading
from tests.long_runs import in_full
from tests.small_llama import LAYERS, Attention, small_llama
from tests.warm import spec_of

from .commands import counted
from .conftest import Fleet, free_port, router_over, settled, until_answering
from .moving import moving
from .processes import EnginePlace
from .prompts import BLOCK, alone, calls_of, complete, computed_prompt_tokens, prompt_of, tokens_of

pytestmark = in_full("the same names among the unit tests, on vLLM's scheduler and its offloading connector")
HERE = Path(__file__).parents[2]
TOKENS = 8
LENGTH = 3 * BLOCK + 40
BLOCK_BYTES = 2 * 4 * LAYERS * Attention().kv_heads * Attention().head_dim * BLOCK
# Of the host's memory over files.
HOST_BLOCKS = 64
TRACE = {"x-tercet-trace": "1"}
# ExampleConnector saves what a prompt's first step computes under the name of the whole prompt.
ONE_STEP = ("--max-num-batched-tokens", "2048", "--max-model-len", "2048")


def flags(sibling: dict[str, Any]) -> list[str]:
    return [*ONE_STEP, "--kv-transfer-config", json.dumps({"kv_connector_extra_config": {"beside": [sibling]}})]


@pytest.fixture(scope="module", params=["memory", "files"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The folder below the tier in host memory, if there is one."""
    return tmp_path_factory.mktemp("files") if request.param == "files" else None


@pytest.fixture(scope="module")
def beside(files: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Both engines behind a router, started for this file."""
    tmp = tmp_path_factory.mktemp("beside")
    disk = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(tmp / "disk")}}
    tier = offloading(1 << 28 if files is None else HOST_BLOCKS * BLOCK_BYTES, files)
    siblings = {"prefill-0": tier, "decode-0": disk}
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    places = {
        name: EnginePlace.of(
            spec_of(name, free_port(), *flags(sibling), model=str(small_llama()), core=core),
            tmp / f"{name}.log",
            VLLM_SERVER_DEV_MODE="1",
            PYTHONPATH=paths,
        )
        for core, (name, sibling) in enumerate(siblings.items())
    }
    for place in places.values():
        place.start()
    try:
        until_answering([*places.values()])
        urls = {name: place.url for name, place in places.items()}
        with router_over(urls, tmp, "--program-arg", "min_send=1") as url:
            yield Fleet(url, places)
    finally:
        for place in places.values():
            place.stop()


@pytest.fixture
async def tiered(beside: Fleet) -> AsyncIterator[HttpEngine]:
    async with HttpEngine("prefill-0", beside.places["prefill-0"].url) as engine:
        yield engine
        await settled(engine)


@pytest.fixture
async def with_disk(beside: Fleet) -> AsyncIterator[HttpEngine]:
    async with HttpEngine("decode-0", beside.places["decode-0"].url) as engine:
        yield engine
        await settled(engine)


def request_of(prompt: list[int], salt: str | None = None) -> Request:
    sampling = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    return Request(seq_id=uuid.uuid4().hex, prompt=tuple(prompt), sampling_params=sampling, cache_salt=salt)


async def generate(engine: HttpEngine, request: Request, begin: int = 0) -> list[int]:
    return [token async for item in engine.start_generate(request, begin) for token in item.token_ids]


def forget(engine: HttpEngine) -> None:
    """Empty the engine's prefix cache, but not its tier."""
    with urllib.request.urlopen(urllib.request.Request(f"{engine.url}/reset_prefix_cache", b""), timeout=60) as answer:
        assert answer.status == 200


async def in_the_tier(engine: HttpEngine, files: Path | None, *contexts: tuple[list[int], str]) -> None:
    """Compute prompts, and wait until they are in the engine's lowest tier only."""
    for prompt, salt in contexts:
        await generate(engine, request_of(prompt, salt))
        await until_kept(engine, prompt, salt)
    if files is not None:
        await fill_host(engine, files)
    for prompt, salt in contexts:
        await until_kept(engine, prompt, salt)


async def until_kept(engine: HttpEngine, prompt: list[int], salt: str) -> None:
    async with asyncio.timeout(60):
        while True:
            await settled(engine)
            forget(engine)
            async with engine.prep_recv(request_of(prompt, salt)) as space:
                if (space.matched_len, space.tier_len) == (0, len(prompt) // BLOCK * BLOCK):
                    return
            await asyncio.sleep(0.1)


async def fill_host(engine: HttpEngine, files: Path) -> None:
    """Compute other prompts until as many blocks of them as the host's memory has are in files: all else left it."""

    def kept() -> int:
        return len(list(files.rglob("*.bin")))

    wanted = kept() + HOST_BLOCKS
    async with asyncio.timeout(120):
        while kept() < wanted:
            await generate(engine, request_of(prompt_of(8 * BLOCK, seed=99), uuid.uuid4().hex))
            await settled(engine)


def loaded_bytes(engine: HttpEngine, files: Path | None) -> tuple[float, float]:
    """What the tier has loaded so far: from the host's memory, and before that from files."""
    names = ("vllm:kv_offload_load_bytes_total", "vllm:kv_offload_tiering_read_bytes_total")
    into_kv, from_files = (counted(engine.url, name) for name in names)
    return into_kv, from_files if files is not None else into_kv


@asynccontextmanager
async def loading(engine: HttpEngine, files: Path | None, blocks: int) -> AsyncGenerator[None]:
    """Afterwards as many blocks came from the lowest tier, through the ones above it."""
    before = loaded_bytes(engine, files)
    yield
    await settled(engine)
    into_kv, from_files = (now - then for now, then in zip(loaded_bytes(engine, files), before, strict=True))
    assert (into_kv, from_files) == (blocks * BLOCK_BYTES, blocks * BLOCK_BYTES)


async def test_prefill_decode_and_moves_give_the_tokens_of_one_engine(beside: Fleet, tiered: HttpEngine) -> None:
    prompts = [prompt_of(LENGTH + 30 * number, seed=90) for number in range(4)]
    fields: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "repetition_penalty": 1.3}
    expected = [await alone(tiered.url, prompt, **fields) for prompt in prompts]
    async with moving(beside) as moved:
        answers = await asyncio.gather(
            *(complete(beside.url, prompt, TRACE, cache_salt=uuid.uuid4().hex, **fields) for prompt in prompts)
        )
    assert [tokens_of(answer) for answer in answers] == expected
    assert moved
    assert all("remote_send" in calls_of(answer) for answer in answers)


async def test_a_tier_is_loaded_instead_of_computed_and_nothing_is_sent(
    tiered: HttpEngine, with_disk: HttpEngine, files: Path | None
) -> None:
    prompt, salt = prompt_of(LENGTH, seed=91), uuid.uuid4().hex
    expected = await alone(tiered.url, prompt, max_tokens=TOKENS, ignore_eos=True)
    await in_the_tier(tiered, files, (prompt, salt))
    before = await computed_prompt_tokens(tiered.url)
    members = [
        Member(with_disk.name, with_disk.url, "prefill", with_disk),
        Member(tiered.name, tiered.url, "decode", tiered),
    ]
    trace, tokens = Trace(), list[int]()
    program = load_program("disaggregated", {"min_send": BLOCK})
    async with loading(tiered, files, LENGTH // BLOCK):
        async for output in outputs_of(program(request_of(prompt, salt), FleetView(EngineFleet(members), trace))):
            tokens += output.token_ids
    assert tokens == expected
    assert [event.verb for event in trace.events] == ["prep_recv", "start_generate"]
    assert await computed_prompt_tokens(tiered.url) - before == LENGTH % BLOCK


async def test_kv_that_only_a_tier_has_is_sent(tiered: HttpEngine, with_disk: HttpEngine, files: Path | None) -> None:
    prompt, salt = prompt_of(LENGTH, seed=92), uuid.uuid4().hex
    expected = await alone(tiered.url, prompt, max_tokens=TOKENS, ignore_eos=True)
    await in_the_tier(tiered, files, (prompt, salt))
    request = request_of(prompt, salt)
    async with with_disk.prep_recv(request) as space:
        async with loading(tiered, files, LENGTH // BLOCK):
            sent = await tiered.remote_send(request, space, 0)
        assert sent.end == LENGTH
        assert await generate(with_disk, request, sent.end) == expected


async def test_kv_that_was_loaded_within_the_step_is_sent(tiered: HttpEngine, with_disk: HttpEngine) -> None:
    """ExampleConnector finds prompts by their tokens alone, so another salt is new to the prefix cache only."""
    prompt = prompt_of(LENGTH, seed=93)
    expected = await alone(tiered.url, prompt, max_tokens=TOKENS, ignore_eos=True)
    assert await generate(with_disk, request_of(prompt, uuid.uuid4().hex)) == expected
    before = await computed_prompt_tokens(with_disk.url)
    request = request_of(prompt, uuid.uuid4().hex)
    async with tiered.prep_recv(request) as space:
        sent = await with_disk.remote_send(request, space, 0)
        assert await computed_prompt_tokens(with_disk.url) - before == LENGTH % BLOCK
        assert await generate(tiered, request, sent.end) == expected


async def test_received_kv_is_kept_by_the_tier_too(
    tiered: HttpEngine, with_disk: HttpEngine, files: Path | None
) -> None:
    prompt, salt = prompt_of(LENGTH, seed=94), uuid.uuid4().hex
    expected = await alone(tiered.url, prompt, max_tokens=TOKENS, ignore_eos=True)
    request = request_of(prompt, salt)
    async with tiered.prep_recv(request) as space:
        sent = await with_disk.remote_send(request, space, 0)
        assert await generate(tiered, request, sent.end) == expected
    await in_the_tier(tiered, files, (prompt, salt))
    async with loading(tiered, files, LENGTH // BLOCK):
        assert await generate(tiered, request_of(prompt, salt)) == expected
    assert counted(tiered.url, "tercet_fences_open") == 0


async def test_contexts_come_back_from_the_lowest_tier_while_others_move(
    beside: Fleet, tiered: HttpEngine, with_disk: HttpEngine, files: Path | None
) -> None:
    """Half of them to be continued there, half of them to be sent; others are sent, received and moved meanwhile."""
    kept = [(prompt_of(LENGTH + 30 * number, seed=95), uuid.uuid4().hex) for number in range(6)]
    others = [prompt_of(LENGTH + 30 * number, seed=96) for number in range(3)]
    fields: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True}
    expected = [await alone(tiered.url, prompt, max_tokens=TOKENS, ignore_eos=True) for prompt, _ in kept]
    expected_of_others = [await alone(tiered.url, prompt, **fields) for prompt in others]
    await in_the_tier(tiered, files, *kept)
    before = loaded_bytes(tiered, files)

    async def again(number: int, request: Request) -> list[int]:
        if number % 2:
            return await generate(tiered, request)
        async with with_disk.prep_recv(request) as space:
            sent = await tiered.remote_send(request, space, 0)
            return await generate(with_disk, request, sent.end)

    async with moving(beside) as moved:
        tokens, answers = await asyncio.gather(
            asyncio.gather(*(again(number, request_of(*context)) for number, context in enumerate(kept))),
            asyncio.gather(
                *(complete(beside.url, prompt, TRACE, cache_salt=uuid.uuid4().hex, **fields) for prompt in others)
            ),
        )
    assert tokens == expected
    assert [tokens_of(answer) for answer in answers] == expected_of_others
    assert moved
    into_kv, from_files = (now - then for now, then in zip(loaded_bytes(tiered, files), before, strict=True))
    blocks = sum(len(prompt) // BLOCK for prompt, _ in kept)
    assert min(into_kv, from_files) >= blocks * BLOCK_BYTES
