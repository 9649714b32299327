"""The router's page below a prefix of a real Envoy, which may also show the admin key for those whom it lets in."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tercet.cluster.child_process import Process
from tercet.cluster.ports import free_ports
from tercet.router.observe.metrics import Metrics
from tests.unit.router.conftest import metrics  # noqa: F401  # pyright: ignore[reportUnusedImport]
from tests.unit.router.page.chromium import COMMAND, MISSING, chromium
from tests.unit.router.page.page_fleet import PageFleet, page_fleet, served

from .gateway import HOST, envoy_binary

pytestmark = pytest.mark.timeout(300)
KEY = "the-admin-key"
ASKS, OPEN = "/fleets/a", "/operators"
"""Below the first one the browser shows a key; below the second one Envoy does."""
LIVE = "document.querySelector('#status')?.innerText === 'live'"


def routes() -> list[dict[str, Any]]:
    """As docs/page.md has them."""
    streamed = {"cluster": "router", "prefix_rewrite": "/", "timeout": "0s"}
    key = {"header": {"key": "authorization", "value": f"Bearer {KEY}"}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
    return [
        {"match": {"prefix": f"{ASKS}/"}, "route": streamed},
        {"match": {"prefix": f"{OPEN}/"}, "route": streamed, "request_headers_to_add": [key]},
    ]


def envoy_config(port: int, admin: int, router: int) -> dict[str, Any]:
    def address(number: int) -> dict[str, Any]:
        return {"socket_address": {"address": HOST, "port_value": number}}

    types = "type.googleapis.com/envoy.extensions.filters"
    manager = {
        "@type": f"{types}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "page",
        "route_config": {"virtual_hosts": [{"name": "page", "domains": ["*"], "routes": routes()}]},
        "http_filters": [
            {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{types}.http.router.v3.Router"}}
        ],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address(router)}}]}]
    cluster = {"name": "router", "load_assignment": {"cluster_name": "router", "endpoints": endpoints}}
    listener = {"name": "page", "address": address(port), "filter_chains": [chain]}
    return {"admin": {"address": address(admin)}, "static_resources": {"listeners": [listener], "clusters": [cluster]}}


@asynccontextmanager
async def behind_envoy(fleet: PageFleet, folder: Path) -> AsyncGenerator[str]:
    """The address of an Envoy before the fleet's router."""
    binary = envoy_binary()
    assert binary is not None
    port, admin = free_ports(HOST, 2)
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(served(fleet.app))
        file = folder / "envoy.yaml"
        file.write_text(yaml.safe_dump(envoy_config(port, admin, int(url.rpartition(":")[2]))))
        argv = binary, "-c", str(file), "--concurrency", "1", "--base-id", str((os.getpid() + 1) % 60000)
        process = Process("envoy", argv, {}, folder / "envoy.log", grace=5.0)
        stack.push_async_callback(process.stop)
        await process.start()
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            while not await answers(session, f"http://{HOST}:{port}{ASKS}/tercet/about"):
                await asyncio.sleep(0.1)
        yield f"http://{HOST}:{port}"


async def answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def frames(answer: aiohttp.ClientResponse, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async for line in answer.content:
        if line.startswith(b"data: "):
            found.append(json.loads(line.removeprefix(b"data: ")))
        if len(found) == count:
            break
    return found


async def test_events_flow_through_envoy_to_those_with_a_key(metrics: Metrics, tmp_path: Path) -> None:  # noqa: F811
    async with (
        page_fleet(3, metrics, admin_key=KEY) as fleet,
        behind_envoy(fleet, tmp_path) as envoy,
        aiohttp.ClientSession(envoy, timeout=aiohttp.ClientTimeout(60)) as session,
    ):
        async with session.get(f"{ASKS}/tercet", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["location"]) == (307, "tercet/"), "it stays below the prefix"
        async with session.get(f"{ASKS}/tercet/stream") as answer:
            assert answer.status == 401
        shown = {"authorization": f"Bearer {KEY}"}
        for prefix, headers in ((ASKS, shown), (OPEN, {}), (OPEN, {"authorization": "Bearer another"})):
            async with session.get(f"{prefix}/tercet/stream", headers=headers) as answer:
                assert (answer.status, answer.headers["x-tercet-view"]) == (200, "admin")
                whole, *others = await frames(answer, 3)
                assert [seat[0] for seat in whole["engines"]] == ["prefill-0", "decode-0", "decode-1"]
                assert all(whole["t"] < each["t"] for each in others), "each came as it was made"
        # Envoy shows the key for everybody whom it lets in, so a page of another origin must not use it.
        drain = f"{OPEN}/tercet/v1/engines/decode-1/drain"
        for foreign in ({"origin": "http://elsewhere"}, {"sec-fetch-site": "cross-site"}):
            async with session.post(drain, headers=foreign) as answer:
                assert answer.status == 403
        assert not fleet.fleet.member("decode-1").draining
        async with session.post(drain, headers={"origin": envoy, "sec-fetch-site": "same-origin"}) as answer:
            assert answer.status == 200
        assert fleet.fleet.member("decode-1").draining


@pytest.mark.skipif(COMMAND is None, reason=MISSING)
async def test_the_page_works_below_prefixes_of_envoy(metrics: Metrics, tmp_path: Path) -> None:  # noqa: F811
    async with (
        page_fleet(3, metrics, admin_key=KEY) as fleet,
        behind_envoy(fleet, tmp_path) as envoy,
        chromium(tmp_path / "browser") as tab,
    ):
        await tab.open(f"{envoy}{ASKS}/tercet")
        await tab.until("document.querySelector('#key-dialog').open")
        tab.problems.clear()  # the refusal that made it ask
        await tab.js(f"document.querySelector('#key-value').value = {json.dumps(KEY)}")
        await tab.click("#key-use")
        await tab.until(LIVE)
        await tab.js("sessionStorage.clear()")
        await tab.open(f"{envoy}{OPEN}/tercet/")
        await tab.until(LIVE)
        assert not await tab.js("document.querySelector('#key-dialog').open"), "Envoy shows it"
        await tab.until("document.querySelectorAll('.card').length === 3")
        await fleet.ask(output=20)
        await tab.until("document.querySelector('#program-table').innerText.includes('disaggregated\\t100%\\t1')")
        await tab.click(".card[aria-label^='decode-1']")
        await tab.until("document.querySelector('#engine-dialog').open")
        await tab.click("#drain")
        await tab.until("document.querySelector('#confirm-dialog').open")
        await tab.click("#confirm-yes")
        await tab.until("document.querySelector('#engine-facts').innerText.includes('draining')")
        assert fleet.fleet.member("decode-1").draining
        assert [asked for asked in tab.urls if not asked.startswith((envoy, "about:"))] == []
        assert tab.problems == []
