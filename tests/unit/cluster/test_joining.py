"""`tercet engine --join`: simulated engines join a running fleet, are emptied and leave, die, and come back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tercet.cluster.local import local_fleet
from tercet.cluster.model import resolve_tokenizer
from tercet.cluster.ports import free_ports
from tercet.cluster.up_config import UpConfig

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600), pytest.mark.usefixtures("forked")]
PROFILE = "llama-3.1-8b-h100-tp1"
SECONDS = 200


@pytest.fixture
async def url(tmp_path: Path) -> AsyncGenerator[str]:
    config = UpConfig(
        simulate=PROFILE, prefill=0, decode=0, both=1, port=0, log_dir=str(tmp_path), secret="right",
        program="data_parallel",
    )  # fmt: skip
    model = await asyncio.to_thread(resolve_tokenizer, "smollm2")
    async with local_fleet(config, model, lambda *_: None) as fleet:
        yield fleet.url


def joining(url: str, port: int, secret: str = "right", *more: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "tercet.cli", "engine", "--simulate", PROFILE, "--port", str(port), "--name", "more",
        "--join", url, *more,
    ]  # fmt: skip
    environment = {**os.environ, "TERCET_SECRET": secret}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)


async def members(url: str) -> dict[str, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/tercet/v1/engines") as response:
        return {each["name"]: each for each in await response.json()}


async def until_members(url: str, *names: str) -> dict[str, dict[str, Any]]:
    async with asyncio.timeout(SECONDS):
        while True:
            found = await members(url)
            if found.keys() == {"engine-0", *names} and all(each["reachable"] for each in found.values()):
                return found
            await asyncio.sleep(0.1)


def servers_at(port: int) -> list[int]:
    """The engines there; not the command that has joined, nor a guard, whose command lines name the port, too."""
    found: list[int] = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            command = process.cmdline()
            if str(port) in command and "--join" not in command and not any("guard.py" in part for part in command):
                found.append(process.pid)
    return found


async def stream(url: str, tokens: int) -> str:
    body = {"model": "smollm2", "prompt": "One two", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        return (await response.read()).decode()


async def said_until_end(process: subprocess.Popen[bytes]) -> str:
    said, _ = await asyncio.to_thread(process.communicate, None, SECONDS)
    return said.decode()


async def test_engines_join_are_emptied_and_leave(url: str) -> None:
    port = free_ports("127.0.0.1", 2)[0]
    process = joining(url, port, "right", "--role", "decode", "--instances", "2")
    try:
        found = await until_members(url, "more-0", "more-1")
        assert {found[name]["role"] for name in ("more-0", "more-1")} == {"decode"}
        streams = [asyncio.create_task(stream(url, 400)) for _ in range(12)]
        async with asyncio.timeout(SECONDS):
            while not all(each["in_flight"] for each in (await members(url)).values()):
                await asyncio.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        said = await said_until_end(process)
        assert process.returncode == 128 + signal.SIGTERM, said
        assert said.count("has left the router's fleet") == 2, said
        await until_members(url)
        for text in await asyncio.gather(*streams):
            assert text.rstrip().endswith("data: [DONE]"), text
            assert '"error"' not in text
    finally:
        process.kill()
        process.wait()


class Router:
    """A router that begins without an engine, and may be killed and started again at its port."""

    def __init__(self, folder: Path) -> None:
        (port,) = free_ports("127.0.0.1", 1)
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / "router.log"
        self._command = [
            sys.executable, "-m", "tercet.cli", "router", "--model", "smollm2", "--openai-layer", "small",
            "--await-engines", "--port", str(port), "--program", "data_parallel",
        ]  # fmt: skip
        self.process = started(self._command, self._log)

    async def killed_and_started(self) -> None:
        self.process.kill()
        await asyncio.to_thread(self.process.wait, 60)
        self.process = started(self._command, self._log)


@pytest.fixture
async def empty(tmp_path: Path) -> AsyncGenerator[Router]:
    router = Router(tmp_path)
    try:
        yield router
    finally:
        router.process.terminate()
        await asyncio.to_thread(router.process.wait, 60)


def started(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "TERCET_SECRET": "right"})


async def asked(url: str) -> tuple[int, str]:
    body = {"model": "smollm2", "prompt": "One two three.", "max_tokens": 3, "ignore_eos": True}
    async with aiohttp.ClientSession() as session:
        with suppress(aiohttp.ClientConnectionError):
            async with session.post(f"{url}/v1/completions", json=body) as response:
                return response.status, await response.text()
    return 0, "no connection"


async def until_asked(url: str, wanted: int) -> str:
    async with asyncio.timeout(SECONDS):
        while True:
            status, text = await asked(url)
            if status == wanted:
                return text
            assert status in (0, 503), text
            await asyncio.sleep(0.1)


async def test_a_router_without_an_engine_says_so_until_one_joins(empty: Router) -> None:
    assert "this router has no engine yet" in await until_asked(empty.url, 503)
    assert await members(empty.url) == {}
    process = joining(empty.url, free_ports("127.0.0.1", 1)[0])
    try:
        assert '"completion_tokens":3' in (await until_asked(empty.url, 200)).replace(" ", "")
        assert (await members(empty.url)).keys() == {"more"}
        # Without a file of its state: the engine joins again by itself.
        await empty.killed_and_started()
        await until_asked(empty.url, 200)
        assert (await members(empty.url)).keys() == {"more"}
    finally:
        process.terminate()
        said = await said_until_end(process)
    assert "has left the router's fleet" in said


async def test_one_that_dies_leaves_and_its_command_fails(url: str) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    process = joining(url, port)
    try:
        await until_members(url, "more")
        for pid in await asyncio.to_thread(servers_at, port):
            os.kill(pid, signal.SIGKILL)
        said = await said_until_end(process)
        assert process.returncode == 1, said
        assert "was killed by SIGKILL" in said
        await until_members(url)
    finally:
        process.kill()
        process.wait()


async def test_a_wrong_secret_is_said_and_refused(url: str) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    process = joining(url, port, "wrong")
    try:
        assert process.stdout is not None
        async with asyncio.timeout(SECONDS):
            while "is not a member" not in (line := (await asyncio.to_thread(process.stdout.readline)).decode()):
                assert process.poll() is None, line
        assert "fleet's secret" in line
        assert (await members(url)).keys() == {"engine-0"}
    finally:
        process.terminate()
        await said_until_end(process)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--role", "decode"], "needs --join"),
        (["--join", "nonsense"], "--join"),
        (["--join", "http://127.0.0.1:1", "--host", "0.0.0.0"], "--host"),
        (["--join", "http://127.0.0.1:1", "--print"], "--print"),
    ],
)
def test_what_does_not_fit_is_refused(given: list[str], said: str) -> None:
    command = [sys.executable, "-m", "tercet.cli", "engine", "--simulate", PROFILE, *given]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (ended.returncode, said in ended.stderr) == (2, True), ended.stderr
