"""A store beside real engines: KV outlives the engine that computed it and the store, and damage is a miss."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tercet.fleet import EngineFleet, FleetView, Member, Trace
from tercet.programs import load_program, outputs_of
from tercet.protocol import Request, TercetError, Usage
from tercet.store.disk import HEAD, FileHeader
from tercet.wire.client import HttpEngine
from tests.longest_wait import until
from tests.warm import MODEL, start_guarded

from .conftest import START_SECONDS, Fleet, answers, free_port, get_json, router_over, settled
from .processes import processes_of, send_signal, stopped
from .prompts import BLOCK, prompt_of

pytestmark = [pytest.mark.usefixtures("nothing_leaks"), pytest.mark.verifies("a store")]
TOKENS = 6
Answer = tuple[list[int], tuple[int, int, int]]


class StoreProcess:
    """`tercet store`, which can be killed and started again where it was."""

    def __init__(self, mirror: str, tmp: Path) -> None:
        self.disk, self.log, port = tmp / "kv", tmp / "store.log", free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = [
            sys.executable, "-m", "tercet.cli", "store", "--mirror", mirror, "--memory", "64MiB", "--disk",
            str(self.disk), "--disk-size", "256MiB", "--port", str(port), "--name", "store-0",
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = start_guarded(self._command, os.environ, output)
        deadline = time.monotonic() + START_SECONDS
        while not answers(f"{self.url}/health"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(self.log.read_text()[-4000:])
            time.sleep(0.1)

    def kill(self) -> None:
        send_signal(processes_of(self.url), signal.SIGKILL)
        self.process.wait(timeout=60)

    @property
    def files(self) -> list[Path]:
        return sorted(path for path in self.disk.glob("tercet-*/*") if path.suffix != ".part")


@pytest.fixture
def store(fleet: Fleet, tmp_path: Path) -> Iterator[StoreProcess]:
    found = StoreProcess(fleet.engine_url("prefill"), tmp_path)
    yield found
    found.process.terminate()
    found.process.wait(timeout=60)


def request_of(prompt: list[int], salt: str) -> Request:
    sampling = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    return Request(seq_id=uuid.uuid4().hex, prompt=tuple(prompt), sampling_params=sampling, cache_salt=salt)


async def generate(engine: HttpEngine, request: Request, begin: int = 0) -> Answer:
    """The tokens, and how many of the prompt were cached, received and computed."""
    outputs = [output async for output in engine.start_generate(request, begin)]
    usage = outputs[0].usage
    assert usage is not None
    return [token for each in outputs for token in each.token_ids], (usage.cached, usage.received, usage.computed)


async def pull(
    holder: HttpEngine, receiver: HttpEngine, prompt: list[int], salt: str
) -> tuple[list[int], tuple[int, int, int]]:
    """Generate on a receiver with what a holder has of the prompt."""
    request, begin = request_of(prompt, salt), 0
    async with receiver.prep_recv(request, len(prompt) - 1) as space:
        try:
            async with asyncio.timeout(5.0):
                begin = (await holder.remote_send(request, space, space.matched_len, cached_only=True)).end
        except (TercetError, TimeoutError):
            begin = space.matched_len
        return await generate(receiver, request, begin)


async def keep(engine: HttpEngine, store: HttpEngine, prompt: list[int], salt: str) -> int:
    """Copy a prompt's KV from an engine to a store; return its end."""
    request = request_of(prompt, salt)
    async with store.prep_recv(request) as space:
        return (await engine.remote_send(request, space, space.matched_len, cached_only=True)).end


async def test_kv_outlives_its_engine_and_the_stores_process_and_damage_is_computed_again(
    store: StoreProcess, prefill: HttpEngine, decode: HttpEngine
) -> None:
    whole, damaged, salt = prompt_of(4 * BLOCK + 17, seed=56), prompt_of(4 * BLOCK + 17, seed=57), uuid.uuid4().hex
    tokens = [(await generate(prefill, request_of(each, salt)))[0] for each in (whole, damaged)]
    async with HttpEngine("store-0", store.url) as keeper:
        assert await keep(prefill, keeper, whole, salt) == 4 * BLOCK
        await until(lambda: len(store.files) == 4)
        first = {*store.files}
        assert await keep(prefill, keeper, damaged, salt) == 4 * BLOCK
        await until(lambda: len(store.files) == 8)
        assert await keep(prefill, keeper, damaged, salt) == 4 * BLOCK  # held already: nothing is sent
    store.kill()
    third = _third({*store.files} - first)
    content = bytearray(third.read_bytes())
    content[-1000] ^= 8
    third.write_bytes(content)
    store.start()
    async with HttpEngine("store-0", store.url) as keeper:
        assert await pull(keeper, decode, whole, salt) == (tokens[0], (0, 4 * BLOCK, 17))
        assert await pull(keeper, decode, damaged, salt) == (tokens[1], (0, 2 * BLOCK, 2 * BLOCK + 17))
        assert not third.exists()
        _, (cached, received, _) = await pull(keeper, decode, whole, uuid.uuid4().hex)  # another tenant
        assert (cached, received) == (0, 0)
        with stopped(processes_of(store.url)):  # it says nothing, and the prompt is computed
            found, (cached, received, _) = await pull(keeper, decode, whole, uuid.uuid4().hex)
            assert (found, cached, received) == (tokens[0], 0, 0)
        await settled(keeper)


def _third(files: set[Path]) -> Path:
    """The file of the third block of a prompt, by the parents that headers name."""
    parents = dict[bytes | None, tuple[Path, bytes]]()
    for file in files:
        with file.open("rb") as opened:
            _, length, _ = HEAD.unpack(opened.read(HEAD.size))
            content = msgspec.msgpack.decode(opened.read(length), type=FileHeader).content
        parents[content.parent] = file, content.name
    _, name = parents[None]
    _, name = parents[name]
    return parents[name][0]


async def test_the_program_fetch_pulls_from_a_store_and_does_without_one_that_stands_still(
    store: StoreProcess, prefill: HttpEngine, decode: HttpEngine
) -> None:
    prompts, salt = [prompt_of(3 * BLOCK + 17, seed=58), prompt_of(3 * BLOCK + 17, seed=59)], uuid.uuid4().hex
    tokens = [(await generate(prefill, request_of(each, salt)))[0] for each in prompts]
    async with HttpEngine("store-0", store.url) as keeper:
        for each in prompts:
            assert await keep(prefill, keeper, each, salt) == 3 * BLOCK
        fleet = EngineFleet(
            [Member(decode.name, decode.url, "both", decode), Member("store-0", store.url, "store", keeper)]
        )

        async def fetched(prompt: list[int]) -> tuple[list[int], Usage | None]:
            request = request_of(prompt, salt)
            fleet.picking.note_routed(request, ["store-0"])
            outputs = [each async for each in outputs_of(load_program("fetch")(request, FleetView(fleet, Trace())))]
            return [token for each in outputs for token in each.token_ids], outputs[0].usage

        assert await fetched(prompts[0]) == (tokens[0], Usage(received=3 * BLOCK, computed=17))
        with stopped(processes_of(store.url)):
            assert await fetched(prompts[1]) == (tokens[1], Usage(computed=3 * BLOCK + 17))
        await settled(keeper)


async def test_a_store_is_never_picked_and_gets_the_prompts_that_engines_have_computed(
    store: StoreProcess, fleet: Fleet, tmp_path: Path
) -> None:
    with router_over({**fleet.engine_urls(), "store-0": store.url}, tmp_path, "--program", "data_parallel") as url:
        listed = {each["name"]: each for each in get_json(f"{url}/tercet/v1/engines")}
        assert (listed["store-0"]["role"], listed["store-0"]["reachable"]) == ("store", True)
        for _ in range(4):
            assert _completion(url) == TOKENS
        await until(lambda: len(store.files) == 2)


async def test_a_drained_engine_passes_its_contexts_on(
    fleet: Fleet, tmp_path: Path, prefill: HttpEngine, decode: HttpEngine
) -> None:
    prompt, urls = prompt_of(3 * BLOCK + 20, seed=60), {"both-0": prefill.url, "both-1": decode.url}
    request = replace(request_of(prompt, "x"), cache_salt=None)
    with router_over(urls, tmp_path, "--program", "data_parallel") as url:
        _changed(f"{url}/tercet/v1/engines/both-1/drain", "POST")
        assert _completion(url, prompt) == TOKENS  # on the other one
        _changed(f"{url}/tercet/v1/engines/both-1/drain", "DELETE")
        said = await asyncio.to_thread(_tercet, "engines", "drain", "both-0", "--wait", "--url", url)
        assert said.splitlines()[-1] == (
            f"both-0 is empty: none moved, 0 left; 1 context ({3 * BLOCK} tokens) went to both-1"
        )
        assert "contexts_kept: both-0 leaves, 1 of its contexts went to both-1" in _log(tmp_path)
        (record,) = get_json(f"{url}/tercet/v1/contexts")  # nothing was wanted when both-1 was drained
        assert (record["engine"], record["dropped"], record["is_over"]) == ("both-0", {}, True)
        assert record["to"] == {"both-1": {"contexts": 1, "tokens": 3 * BLOCK}}
        (listed,) = (each for each in get_json(f"{url}/tercet/v1/engines") if each["name"] == "both-0")
        assert listed["in_flight"] == 0
    tokens, (cached, received, computed) = await generate(decode, request)
    assert (cached, received, computed) == (3 * BLOCK, 0, 20)
    assert tokens == (await generate(prefill, replace(request, seq_id=uuid.uuid4().hex)))[0]


def _tercet(*line: str) -> str:
    command = [sys.executable, "-m", "tercet.cli", *line]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def _log(tmp: Path) -> str:
    return (tmp / "router.log").read_text()


def _completion(url: str, prompt: list[int] | None = None) -> int:
    body = {"model": MODEL, "prompt": prompt or prompt_of(2 * BLOCK + 20), "max_tokens": TOKENS, "ignore_eos": True}
    return _changed(f"{url}/v1/completions", "POST", body)["usage"]["completion_tokens"]


def _changed(url: str, method: str, body: object = None) -> Any:
    content = b"" if body is None else msgspec.json.encode(body)
    call = urllib.request.Request(url, content, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(call, timeout=120) as answer:
        return msgspec.json.decode(answer.read() or b"null")
