"""Plain vLLM engines: a sidecar that speaks NixlConnector's protocol, and a picker that reads their own pages."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.long_runs import in_full
from tests.longest_wait import until

from .client_streams import said_by
from .commands import SECONDS, counted, generating, tercet_process
from .conftest import answers, free_port
from .picker import Picker, picking
from .plain_vllm import (
    AT_ONCE,
    BLOCK,
    TOKEN_BYTES,
    computed,
    fetched,
    fetched_bytes,
    load,
    mend,
    plain_engine,
    unpinned,
)
from .processes import EnginePlace, processes_of, send_signal, stopped
from .prompts import ANSWER_TIMEOUT, alone, complete, prompt_of, tokens_of

pytestmark = [
    in_full("tests/unit/gateway/sidecar, whose servers speak the protocol of NixlConnector"),
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="no NIXL: scripts/install-transport-extras"),
]
PREFILL, DECODE = "prefill", "decode"
LENGTH = 150
"""Tokens of a prompt: more than one step of the engine that prefills."""
TOKENS = 6
TEXT = "The sea is wide and the wind is cold, and the old sailor tells the children of the ships he saw. " * 6
ELSEWHERE, HERE = "disaggregated", "disaggregated -> data_parallel"
"""What an answer's trace says of where its prompt was prefilled."""
REQUESTS = 100


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, EnginePlace]]:
    tmp = tmp_path_factory.mktemp("plain")
    places = {name: plain_engine(name, core, tmp) for core, name in enumerate((PREFILL, DECODE))}
    try:
        mend(places)
        assert not any(answers(f"{place.url}/tercet/v1/status") for place in places.values())
        yield places
    finally:
        for place in places.values():
            place.stop()


@dataclass
class Pair:
    """The engine that prefills, the one that decodes, and a sidecar in front of that."""

    prefill: str
    decode: str
    sidecar: str

    @property
    def headers(self) -> dict[str, str]:
        return {"x-prefiller-host-port": self.prefill.removeprefix("http://"), "x-tercet-trace": "1"}


@pytest.fixture
def pair(engines: Mapping[str, EnginePlace], tmp_path: Path) -> Iterator[Pair]:
    """The engine may stand still for as long as a test has it do so."""
    mend(engines)
    port = free_port()
    made = Pair(engines[PREFILL].url, engines[DECODE].url, f"http://127.0.0.1:{port}")
    flags = "--prefill-hosts=127.0.0.1:*", "--connector=nixl", f"--stuck-after={SECONDS}", "--prefill-stuck-after=10"
    command = "sidecar", f"--engine={made.decode}", f"--port={port}", *flags
    with tercet_process(tmp_path / "sidecar.log", f"{made.sidecar}/health", *command):
        yield made


@dataclass
class Told:
    """An answer: what it says, chunk by chunk, and where its prompt was prefilled."""

    choices: list[dict[str, Any]]
    program: str


async def asked(url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Told:
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    async with (
        aiohttp.ClientSession(timeout=ANSWER_TIMEOUT) as session,
        session.post(url + path, json=body, headers=headers) as answer,
    ):
        text = await answer.text()
        assert answer.status == 200, text
    said: list[dict[str, Any]] = said_by(text) if body.get("stream") else [msgspec.json.decode(text)]
    assert not any("error" in each for each in said), text
    choices = [choice for each in said for choice in each.get("choices", ())]
    return Told(choices, next((each["tercet"]["program"] for each in said if "tercet" in each), ""))


def completion(seed: int, **fields: Any) -> dict[str, Any]:
    given = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    return {"model": "smollm2", "prompt": prompt_of(LENGTH, seed), **given, **fields}


def chat(seed: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{seed}. {TEXT}"}]
    given = {"max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
    return {"model": "smollm2", "messages": messages, **given, **fields}


async def by_itself(pair: Pair, body: Mapping[str, Any], salt: str) -> Told:
    """What the decode engine answers with nothing cached."""
    return await asked(pair.decode, {**body, "cache_salt": salt})


BODIES = {
    "completion": completion(1),
    "streamed completion": completion(2, stream=True),
    "chat": chat(3),
    "streamed chat": chat(4, stream=True, logprobs=True, top_logprobs=2),
}


@pytest.mark.parametrize("kind", BODIES)
async def test_answers_are_those_of_one_engine_and_their_kv_is_anothers(pair: Pair, kind: str) -> None:
    expected = await by_itself(pair, BODIES[kind], "alone")
    before = computed(pair.prefill), computed(pair.decode), fetched(pair.decode), fetched_bytes(pair.decode)
    told = await asked(pair.sidecar, {**BODIES[kind], "cache_salt": kind}, pair.headers)
    assert told.program == ELSEWHERE
    assert _without_ids(told.choices) == _without_ids(expected.choices)
    prompt = computed(pair.prefill) - before[0]
    assert prompt >= LENGTH - 1
    assert computed(pair.decode) == before[1], "the decode engine has prefilled"
    assert fetched(pair.decode) - before[2] == prompt
    blocks = -(-int(prompt) // BLOCK)
    assert fetched_bytes(pair.decode) - before[3] == blocks * BLOCK * TOKEN_BYTES
    await unpinned(pair.prefill)
    await unpinned(pair.decode)


def _without_ids(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where a stream's chunks are cut depends on when tokens come: text and tokens are joined, by choice."""
    joined: dict[int, dict[str, list[Any]]] = {}
    for choice in choices:
        parts = joined.setdefault(choice["index"], {})
        delta = choice.get("delta") or choice.get("message") or {}
        parts.setdefault("text", []).append(choice.get("text") or delta.get("content") or "")
        parts.setdefault("tokens", []).extend(choice.get("token_ids") or ())
        parts.setdefault("ends", []).extend([choice["finish_reason"]] if choice.get("finish_reason") else [])
        parts.setdefault("logprobs", []).extend(
            entry["token"] for entry in (choice.get("logprobs") or {}).get("content", ())
        )
    return [{**parts, "text": "".join(parts["text"]), "index": index} for index, parts in joined.items()]


async def test_kv_of_a_client_that_leaves_is_kept_for_its_lease_at_most(pair: Pair) -> None:
    """The decode engine stands still until the other one has prefilled and the client has left.

    It has been asked by then, so what becomes of the KV is for it to say: it fetches it, or the lease ends.
    """
    done = prefilled(pair.prefill)
    with stopped(processes_of(pair.decode)):
        asking = asyncio.create_task(asked(pair.sidecar, completion(3), pair.headers))
        await until(lambda: prefilled(pair.prefill) != done, SECONDS, every=0.1)
        asking.cancel()
        await asyncio.wait({asking})
    await unpinned(pair.prefill)
    await unpinned(pair.decode)


def prefilled(url: str) -> float:
    """Prefills that are over: requests that ended by their length."""
    return counted(url, "vllm:request_success_total", finished_reason="length")


async def test_all_requests_succeed_while_who_prefills_is_stopped(pair: Pair) -> None:
    prompts = [completion(seed) for seed in range(4)]
    expected = [_without_ids((await by_itself(pair, body, "alone")).choices) for body in prompts]
    left, done = iter(range(REQUESTS)), list[str]()

    async def lane() -> None:
        for number in left:
            which = number % len(prompts)
            told = await asked(pair.sidecar, {**prompts[which], "cache_salt": f"{number}"}, pair.headers)
            assert _without_ids(told.choices) == expected[which], number
            done.append(told.program)

    async def lose() -> None:
        while len(done) < 3 or not load(pair.prefill).running:
            await asyncio.sleep(0.05)
        send_signal(victims, signal.SIGSTOP)

    victims = processes_of(pair.prefill)
    try:
        async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(lane())
            group.create_task(lose())
    finally:
        send_signal(victims, signal.SIGCONT)
    assert ELSEWHERE in done
    assert HERE in done, "nobody was lost"
    await unpinned(pair.prefill)
    await unpinned(pair.decode)
    await until_prefilled_elsewhere(pair)


async def until_prefilled_elsewhere(pair: Pair) -> None:
    """Whoever is back prefills again, once it has answered; a machine that is busy may take a while."""
    async with asyncio.timeout(SECONDS):
        for number in range(1000):
            if (await asked(pair.sidecar, completion(100 + number), pair.headers)).program == ELSEWHERE:
                return


# ---- the picker ------------------------------------------------------------------------------------------------


def picker(engines: Mapping[str, EnginePlace], tmp: Path) -> AbstractAsyncContextManager[Picker]:
    named = [f"--engine={place.url},name={name}" for name, place in engines.items()]
    return picking(tmp, len(named), "--load-from=metrics", *named)


@asynccontextmanager
async def busy(url: str) -> AsyncGenerator[None]:
    """While entered, an engine runs as many as it takes, and three more wait."""
    try:
        async with generating(url, AT_ONCE + 3, lambda: (load(url).running, load(url).waiting) == (AT_ONCE, 3)):
            yield
    finally:
        await unpinned(url)


async def test_picks_follow_the_load_that_pages_tell(engines: Mapping[str, EnginePlace], tmp_path: Path) -> None:
    mend(engines)
    async with picker(engines, tmp_path) as made:
        for name, other in ((PREFILL, DECODE), (DECODE, PREFILL)):
            async with busy(engines[name].url):
                await until_it_says_what_pages_say(made, engines)
                assert made.says("inference_pool_per_pod_queue_size", model_server_pod=name) == 3
                assert made.says("inference_pool_average_running_requests") == AT_ONCE / 2
                assert set(await made.picks(5)) == {engines[other].url}
        with stopped(processes_of(engines[DECODE].url)):
            await made.until_ready(1)
            assert set(await made.picks(5)) == {engines[PREFILL].url}
        await made.until_ready(2)
        await until_picked(made, engines[DECODE].url)


async def until_it_says_what_pages_say(made: Picker, engines: Mapping[str, EnginePlace]) -> None:
    """Pages and the picker's move; there comes a moment at which they agree."""
    async with asyncio.timeout(SECONDS):
        while True:
            pages = {name: load(place.url) for name, place in engines.items()}
            many = len(pages)
            usage = sum(page.kv_usage for page in pages.values()) / many
            queues = {name: made.says("inference_pool_per_pod_queue_size", model_server_pod=name) for name in pages}
            if (
                queues == {name: page.waiting for name, page in pages.items()}
                and made.says("inference_pool_average_running_requests")
                == sum(p.running for p in pages.values()) / many
                and made.says("inference_pool_average_kv_cache_utilization") == pytest.approx(usage)
                and usage > 0
            ):
                return
            await asyncio.sleep(0.05)


async def until_picked(made: Picker, url: str) -> None:
    async with asyncio.timeout(SECONDS):
        while url not in await made.picks():
            await asyncio.sleep(0.1)


async def test_an_engine_is_killed_with_kv_that_others_were_to_fetch(
    engines: Mapping[str, EnginePlace], pair: Pair, tmp_path: Path
) -> None:
    """The decode engine stands still meanwhile: all that it is asked then refers to KV that is no more.

    Of those that are asked some are prefilled when their engine dies, and some are not; half are streams. The picker
    sees the same engine go and come back.
    """
    bodies = [completion(10), completion(11, stream=True), chat(12), chat(13, stream=True)]
    expected = [_without_ids((await by_itself(pair, body, "alone")).choices) for body in bodies]
    async with picker(engines, tmp_path) as made:
        done = prefilled(pair.prefill)
        with stopped(processes_of(pair.decode)):
            asking = [asyncio.create_task(asked(pair.sidecar, body, pair.headers)) for body in bodies]
            await until(lambda: prefilled(pair.prefill) >= done + 2, SECONDS, every=0.05)
            send_signal(processes_of(pair.prefill), signal.SIGKILL)
        async with asyncio.timeout(SECONDS):
            told = await asyncio.gather(*asking)
        assert [_without_ids(each.choices) for each in told] == expected
        assert {each.program for each in told} == {HERE}
        assert tokens_of(await complete(pair.sidecar, prompt_of(LENGTH, 10), pair.headers, max_tokens=1)) == tokens_of(
            await complete(pair.decode, prompt_of(LENGTH, 10), max_tokens=1)
        )
        await unpinned(pair.decode)
        await made.until_ready(1)
        assert set(await made.picks(5)) == {pair.decode}
        mend(engines)
        await made.until_ready(2)
        await until_picked(made, pair.prefill)
    expected_anew = await alone(pair.decode, prompt_of(LENGTH, 20), max_tokens=TOKENS)
    assert tokens_of(await complete(pair.prefill, prompt_of(LENGTH, 20), max_tokens=TOKENS)) == expected_anew
    await until_prefilled_elsewhere(pair)
