"""vLLM's server options and variables at a router: none of them is taken and has no effect; its routes are described
beside other clients, and of two processes that bind one address one listens.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import inspect
import re
import socket
import ssl
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tercet.protocol import BadRequest
from tercet.router.openai import openai_server
from tercet.router.openai.openai_server import (
    HANDED_ON,
    KEEP_ALIVE_VARIABLE,
    REFUSED,
    SERVED_BY_VLLM,
    SERVED_HERE,
    describe_in_a_thread,
    listen_alone,
    options_of,
    refusal_of,
)
from tests.unit.wire.client.certificates import HOST, Authority

# What vLLM's own server tells uvicorn, and a router does not: its options are refused.
NOT_TOLD = {"log_config", "h11_max_incomplete_event_size", "h11_max_header_count"}
# Engines compute by these groups.
OF_ENGINES = ["ParallelConfig", "CacheConfig", "SchedulerConfig", "LoadConfig", "CompilationConfig", "LoRAConfig"]


@pytest.fixture(scope="module")
def groups() -> dict[str, str]:
    openai_server.import_vllm()
    return options_of(openai_server._parser())


def test_every_option_of_the_server_has_a_place(groups: dict[str, str]) -> None:
    places = [SERVED_BY_VLLM, SERVED_HERE, frozenset(REFUSED)]
    for name, group in groups.items():
        if group in ("Frontend", "options", "positional arguments") and refusal_of(name, group) is None:
            assert sum(name in place for place in places) == 1, name
    unplaced = [
        name for name, group in groups.items() if group == "Frontend" and not any(name in place for place in places)
    ]
    assert unplaced == []
    assert set(groups.values()) >= HANDED_ON


@pytest.mark.parametrize("group", OF_ENGINES)
def test_what_engines_do_is_refused(groups: dict[str, str], group: str) -> None:
    found = [name for name, of in groups.items() if of == group]
    assert found
    assert all(refusal_of(name, group) is not None for name in found)


def test_uvicorn_is_told_all_that_vllms_own_server_tells_it(groups: dict[str, str]) -> None:
    from vllm.entrypoints.launchers.api_server import entry

    told, ours = (
        {
            keyword.arg
            for node in ast.walk(ast.parse(inspect.getsource(module)))
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "serve_http"
            for keyword in node.keywords
            if keyword.arg
        }
        for module in (entry, openai_server)
    )
    assert told - {"peer_loads"} - NOT_TOLD <= ours
    variables = set(re.findall(r"envs\.(VLLM_\w+)", inspect.getsource(entry)))
    assert variables <= {KEEP_ALIVE_VARIABLE}


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--enable-log-requests",), "--access-log"),
        (("--lora-modules", "a=/b"), "--lora-modules before the --"),
        (("--config", "x.yaml"), "one by one"),
        (("--config=x.yaml",), "one by one"),
        (("--max-num-seqs", "4"), "give it to them"),
        (("--tensor_parallel_size=2",), "give it to them"),
        (("--gpu-memory-utilization", "0.5"), "give it to them"),
        (("--kv-transfer-config", "{}"), "give it to them"),
        (("--h11-max-header-count", "5"), "not h11"),
        (("--api-server-count", "2"), "--workers"),
        (("--shutdown-timeout", "5"), "before the --"),
        (("--ssl-keyfile", "k"), "--ssl-certfile"),
        (("--enable-ssl-refresh",), "--ssl-certfile"),
        (("--ssl-certfile", "/none.pem"), "TLS cannot be served"),
        (("--grpc",), "HTTP"),
    ],
)
def test_an_option_without_an_effect_is_refused(groups: dict[str, str], flags: tuple[str, ...], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        openai_server.require_flags(flags)


def test_a_socket_file_is_for_one_worker(groups: dict[str, str]) -> None:
    openai_server.require_flags(("--uds", "/run/x"))
    with pytest.raises(BadRequest, match="--uds"):
        openai_server.require_flags(("--uds", "/run/x"), workers=2)


@pytest.mark.parametrize(
    "flags",
    [(), ("--api-key", "a", "b"), ("--tokenizer", "x"), ("--reasoning-parser", "qwen3"), ("--chat-template", "x"),
     ("--root-path", "/api"), ("--limit-mm-per-prompt", '{"image": 1}'), ("--disable-log-stats",)],
)  # fmt: skip
def test_what_is_served_is_taken(groups: dict[str, str], flags: tuple[str, ...]) -> None:
    openai_server.require_flags(flags)


@pytest.mark.parametrize("wrong", ["abc", "-1", "", "1.5"])
def test_a_keep_alive_that_is_no_time_is_refused(
    groups: dict[str, str], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEEP_ALIVE_VARIABLE, wrong)
    with pytest.raises(BadRequest, match=KEEP_ALIVE_VARIABLE):
        openai_server.require_flags(())


@asynccontextmanager
async def serving(args: argparse.Namespace, loads: Any) -> AsyncGenerator[tuple[int, FastAPI]]:
    app = FastAPI()
    app.state.engine_client = None
    app.get("/live")(lambda: "yes")
    with socket.create_server((HOST, 0)) as sock:
        ended, begun = asyncio.Event(), asyncio.Event()

        async def shut_down() -> None:
            begun.set()
            await ended.wait()

        task = asyncio.ensure_future(openai_server.accept(app, args, sock, shut_down, loads))
        try:
            await begun.wait()
            while not app.state.server.started:
                await asyncio.sleep(0)
            yield sock.getsockname()[1], app
        finally:
            ended.set()
            await task


@pytest.mark.parametrize("workers", [1, 2])
async def test_tls_is_served_and_nothing_else(
    groups: dict[str, str], workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_server, "_settle", lambda: None)
    monkeypatch.setenv(KEEP_ALIVE_VARIABLE, "77")
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.issue("router")
    flags = ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--host", HOST]
    openai_server.require_flags(flags)
    loads = (memoryview(bytearray(8)).cast("i"), 0) if workers > 1 else None
    async with serving(openai_server._parser().parse_args(flags), loads) as (port, app):
        assert app.state.server.config.timeout_keep_alive == 77
        trusting = ssl.create_default_context(cafile=str(authority.file))
        reader, writer = await asyncio.open_connection(HOST, port, ssl=trusting)
        writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        plain, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert not (await plain.read()).startswith(b"HTTP/")
        writer.close()


async def test_routes_are_described_once_and_not_on_the_event_loop() -> None:
    app, described = FastAPI(), list[threading.Thread]()
    app.get("/x")(lambda: 1)
    whole = app.openapi

    def openapi() -> dict[str, Any]:
        described.append(threading.current_thread())
        return whole()

    app.openapi = openapi
    describe_in_a_thread(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answers = await asyncio.gather(*(client.get("/openapi.json") for _ in range(3)))
    assert [list(answer.json()["paths"]) for answer in answers] == [["/x"]] * 3
    assert described[0] is not threading.main_thread()
    # The later calls, on the event loop, find the description.
    assert described.count(threading.main_thread()) == 3
    assert len(described) == 4


async def test_without_a_description_nothing_is_added() -> None:
    app = FastAPI(openapi_url=None)
    describe_in_a_thread(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        assert (await client.get("/openapi.json")).status_code == 404


def bound(port: int) -> socket.socket:
    """As vLLM binds."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    return sock


def test_whoever_comes_too_late_is_told() -> None:
    with bound(0) as first:
        port = first.getsockname()[1]
        second = bound(port)
        listen_alone(first)
        with pytest.raises(BadRequest, match=f"127.0.0.1:{port}: Address already in use") as refused:
            listen_alone(second)
        assert refused.value.param == "port"
        assert second.fileno() == -1
