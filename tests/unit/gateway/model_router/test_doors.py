"""What a model router lets through: its keys, the routes for clients, and what a router behind it is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tercet.protocol import BadRequest
from tercet.protocol.errors import Forbidden
from tercet.settings import Source, decode_settings
from tercet.wire.callers import ShownHeaders, require_this_machine
from tercet_gateway.gateway_settings import ModelRouterConfig
from tercet_gateway.model_router import keys_of
from tests.longest_wait import LONGEST_WAIT_S, until
from tests.unit.gateway.model_router.test_model_router import CHAT, Router, World, world


async def raw(found: World, head: str) -> tuple[int, str]:
    """Send a request as it is written, and return the status and the text of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", found.server.port)
    async with asyncio.timeout(LONGEST_WAIT_S):
        writer.write(head.replace("\n", "\r\n").encode())
        answer = (await reader.read()).decode()
        writer.close()
    return int(answer.split()[1]), answer


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.9", "", "unknown.invalid"])
def test_one_that_other_machines_reach_needs_a_key(host: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n")

    def config(**more: Any) -> ModelRouterConfig:
        return decode_settings(ModelRouterConfig, Source({"routers": ["http://127.0.0.1:1"], "host": host, **more}))

    with pytest.raises(BadRequest, match=r"^host: other machines reach .*VLLM_API_KEY or --api-key-file.*--open-to"):
        keys_of(config())
    for more in ({"open-to-all": True}, {"api-key": "k"}, {"api-key-file": str(file)}):
        keys_of(config(**more))
    with pytest.raises(BadRequest, match="is also a client key"):
        keys_of(config(**{"api-key": "k", "admin-key": "k"}))


async def test_clients_need_its_key_on_every_route_but_probes(tmp_path: Path) -> None:
    a = Router("a")
    a.key = "one"
    await a.start()
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    async with world(a, api_key_file=str(file)) as found:  # which polls with the first of them
        for key in ("", "three"):
            shown = {"authorization": f"Bearer {key}"} if key else {}
            assert (await found.ask("a", **shown))[0] == 401
            assert (await found.get("/v1/models", **shown))[0] == 401
            assert (await found.get("/sleep", **shown))[0] == 401
        assert (await found.ask("a", authorization="Bearer two"))[0] == 200
        assert (await found.get("/v1/models", authorization="Bearer one"))[0] == 200
        for path in ("/health", "/live", "/ping", "/metrics"):
            assert (await found.get(path))[0] == 200
        assert (await found.get("/tercet/v1/backends", authorization="Bearer one"))[0] == 401, "no admin key is set"
        file.write_text("two\n")
        async with asyncio.timeout(LONGEST_WAIT_S):
            while (await found.ask("a", authorization="Bearer one"))[0] != 401:
                await asyncio.sleep(0.05)


NOT_FOR_CLIENTS = (
    "/tercet", "/tercet/", "/tercet/stream", "//tercet/stream", "/%74ercet/stream", "/v1/../tercet/stream",
    "/v1/%2e%2e/tercet/stream", "/v1/responses/..%2f..%2ftercet%2fstream", "/v1/responses/..", "/tercet;x/stream",
    "/tercet/v1/members/a", "/x/tercet/v1/status", "http://localhost/tercet/stream", "/v1/load_lora_adapter",
    "/v1/load_lora_adapter/", "/v1/unload_lora_adapter", "/sleep", "/wake_up", "/pause", "/reset_prefix_cache",
    "/collective_rpc", "/server_info", "/abort_requests", "/load", "/docs", "/openapi.json", "/v1/realtime", "/",
    "/v1/chat/completions/../../../sleep",
)  # fmt: skip


async def test_what_is_not_for_clients_does_not_pass() -> None:
    a = await Router("a").start()
    async with world(a) as found:
        for target in NOT_FOR_CLIENTS:
            for method in ("GET", "POST", "OPTIONS", "HEAD"):
                status, said = await raw(found, f"{method} {target} HTTP/1.1\nHost: localhost\nConnection: close\n\n")
                assert (status, target) == (404, target)
                assert "is not for clients" in said or method == "HEAD"
        assert not a.seen


@pytest.mark.parametrize("target", ["/tokenize", "/v1/responses/resp_1/cancel", "/v1/%65mbeddings", CHAT + "?a=b"])
async def test_what_is_for_clients_passes_as_it_is_written(target: str) -> None:
    a = await Router("a").start()
    async with world(a) as found:
        head = f"POST {target} HTTP/1.1\nHost: h:1\nConnection: close, via\nVia: 1.0 them\nForwarded: for=1.2.3.4\n"
        status, _ = await raw(found, head + "X-Forwarded-For: 1.2.3.4\nContent-Length: 2\n\n{}")
        assert (status, a.seen) == (200, [target])
        last = a.headers[-1]
        assert last["via"] == "1.1 tercet", "theirs was for the next hop"
        assert last["x-forwarded-for"] == "1.2.3.4, 127.0.0.1"
        assert a.forwarded[-1] == ["for=1.2.3.4", 'for=127.0.0.1;proto=http;host="h:1"']
        assert last["host"] == "h:1"


async def test_a_browser_asks_without_a_key_and_a_model() -> None:
    a, b = await Router("a").start(), await Router("b").start()
    async with world(a, b, api_key="k") as found:
        status, _ = await raw(found, f"OPTIONS {CHAT} HTTP/1.1\nHost: h\nConnection: close\nOrigin: http://page\n\n")
        assert status == 405, "the simple router here has no answer of its own"


async def test_an_upgrade_is_not_passed_on() -> None:
    a = await Router("a").start()
    async with world(a) as found:
        asked = "Host: localhost\nConnection: Upgrade, close\nUpgrade: websocket\n"
        status, _ = await raw(found, f"GET /tercet/stream HTTP/1.1\n{asked}\n")
        assert status == 404
        await raw(found, f"POST {CHAT} HTTP/1.1\n{asked}Content-Length: 2\n\n{{}}")
        await until(lambda: a.headers)
        assert "upgrade" not in a.headers[-1]


@pytest.mark.parametrize(
    "name", ["via", "forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-port", "x-forwarded-prefix",
             "x-forwarded-client-cert", "x-real-ip"]
)  # fmt: skip
@pytest.mark.parametrize("peer", ["127.0.0.1", None])
def test_a_forwarded_request_is_not_one_of_this_machine(name: str, peer: str | None) -> None:
    require_this_machine(ShownHeaders([("host", "localhost")]), peer)
    with pytest.raises(Forbidden, match="through a proxy"):
        require_this_machine(ShownHeaders([("host", "localhost"), (name, "")]), peer)
