"""An engine of a fleet with a secret: strangers are refused, and so is what they say of others."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import uuid
from collections.abc import Iterator

import aiohttp
import msgspec
import pytest

from tercet.protocol import Request, Unauthorized
from tercet.protocol.headers import INCARNATION_HEADER
from tercet.protocol.wire import API_PREFIX
from tercet.wire.client import HttpEngine, StreamListener

from .conftest import MODEL, free_port, running_engine, settled
from .prompts import prompt_of

SECRET = secrets.token_hex(16)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERCET_SECRET", SECRET)
        with running_engine(tmp_path_factory.mktemp("access"), "guarded") as found:
            yield found


def request(tokens: int = 40) -> Request:
    sampling = {"max_tokens": 3, "temperature": 0}
    return Request(seq_id=uuid.uuid4().hex, prompt=tuple(prompt_of(tokens)), sampling_params=sampling)


async def test_a_stranger_is_refused_on_every_route_and_changes_nothing(url: str) -> None:
    async with HttpEngine("guarded", url, secret=SECRET) as engine, aiohttp.ClientSession() as session:
        before = await settled(engine)
        async with session.get(f"{url}/openapi.json") as answer:
            routes = [(path, method) for path, methods in (await answer.json())["paths"].items() for method in methods]
        ours = [(path, method) for path, method in routes if path.startswith(API_PREFIX)]
        assert len(ours) >= 7
        for path, method in ours:
            for shown in ({}, {"authorization": "Bearer wrong"}, {"authorization": SECRET}):
                body = {"prompt": [1, 2, 3], "seq_id": "stranger"}
                async with session.request(method, f"{url}{path}", json=body, headers=shown) as answer:
                    assert answer.status == 401, (path, shown)
                    assert (await answer.json())["error"]["code"] == "unauthorized"
        after = await settled(engine)
        assert (after.free_blocks, after.leases, after.sends) == (before.free_blocks, 0, 0)


async def test_who_knows_the_secret_is_served_both_ways(url: str) -> None:
    async with StreamListener() as listener:
        for listening in (None, listener):
            async with HttpEngine("guarded", url, listening, secret=SECRET) as engine:
                assert [output async for output in engine.start_generate(request())][-1].finished
                await settled(engine)


async def test_what_another_fleet_s_engine_says_is_not_believed(url: str) -> None:
    async with HttpEngine("guarded", url, secret=SECRET) as engine:
        sequence = request(100)
        async with engine.prep_recv(sequence) as space:
            assert space.kv_addr_info.proof
            forged = msgspec.structs.replace(space.kv_addr_info, proof="", engine="elsewhere")
            with pytest.raises(Unauthorized) as caught:
                await engine.remote_send(request(100), msgspec.structs.replace(space, kv_addr_info=forged), 0)
            assert caught.value.param == "kv_addr_info"
        await settled(engine)


async def test_calls_for_another_start_are_refused(url: str) -> None:
    async with HttpEngine("guarded", url, secret=SECRET) as engine, aiohttp.ClientSession() as session:
        status = await engine.status()
        assert status.incarnation
        assert status.fingerprint
        assert status.dtype == "float32"
        for named, expected in (("another", 409), (status.incarnation, 200)):
            headers = {"authorization": f"Bearer {SECRET}", INCARNATION_HEADER: named}
            async with session.get(f"{url}{API_PREFIX}/status", headers=headers) as answer:
                assert answer.status == expected


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--host", "0.0.0.0"], "set TERCET_SECRET to the same long random text"),
        (["--", "--api-server-count", "2"], "--api-server-count"),
    ],
    ids=["beyond loopback", "two API servers"],
)
def test_a_start_that_must_not_be_is_refused_at_once(flags: list[str], said: str) -> None:
    command = [sys.executable, "-m", "tercet.cli", "engine", "--model", MODEL, "--port", str(free_port()), *flags]
    keyless = {name: value for name, value in os.environ.items() if name not in ("TERCET_SECRET", "VLLM_API_KEY")}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=keyless)
    assert ended.returncode != 0
    assert said in ended.stdout + ended.stderr
