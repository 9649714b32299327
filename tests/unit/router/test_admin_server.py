"""Admin routes at an address of their own: there alone, by TCP or a socket's file, and nothing of clients' there."""

from __future__ import annotations

import asyncio
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tercet.cluster.ports import free_ports
from tercet.fleet.admission import Gate
from tercet.protocol import BadRequest
from tercet.router import admin
from tercet.router.admin.admin_server import admin_served
from tercet.router.pooling import PoolingServers
from tercet.router.router_app import RouterApp
from tercet.router.serve.plans import NamedFiles
from tercet.router.serve.shutdown import Shutdown
from tercet.settings import EngineAddress, Limits, RouterConfig
from tercet.settings.engine_addresses import AdminAddress
from tercet.wire.callers import BearerKeys
from tercet.wire.serving.server_access import AT_ADMIN, AdminAccess, RouterKeys
from tercet_lab.small_openai import serve_small
from tests.simulated_processes import MODEL, PROFILE, running, wait_for

from .conftest import LiveRouter

ENGINES = "/tercet/v1/engines"
ENGINE = (EngineAddress("d", "http://d"),)


def app_of(router: LiveRouter, *, apart: bool = True, keys: tuple[str, ...] = ()) -> FastAPI:
    app = FastAPI()
    app.add_api_route("/v1/models", lambda: {})
    app.add_api_route("/health", lambda: {})
    admin.install(app, router.shared, ["m"])
    gate = Gate(Limits(), router.fleet, router.metrics)
    stack = app.middleware_stack or app.build_middleware_stack()
    admins = AdminAccess(BearerKeys(()), BearerKeys(keys))
    called = router.service.program_called
    app.middleware_stack = RouterApp(stack, None, gate, keys, called, 1000, admins=admins, admin_apart=apart)
    return app


def at_clients(app: Any, **headers: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", headers=headers)


def at_file(path: Path) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://localhost")


# ---- which address serves what -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [ENGINES, "/tercet/v1", "/tercet%2Fv1/status", "/v1/load_lora_adapter"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD"])
async def test_clients_find_no_admin_route(router: LiveRouter, method: str, path: str) -> None:
    async with at_clients(app_of(router)) as client:
        answer = await client.request(method, path, headers={"content-type": "application/json"})
        assert answer.status_code == 404
        assert method == "HEAD" or "--admin-listen" in answer.json()["error"]["message"]


async def test_without_an_address_of_their_own_both_are_at_one(router: LiveRouter) -> None:
    async with at_clients(app_of(router, apart=False)) as client:
        assert [(await client.get(path)).status_code for path in (ENGINES, "/v1/models")] == [200, 200]


async def test_a_client_cannot_say_that_it_comes_by_the_admin_address(router: LiveRouter) -> None:
    async with at_clients(app_of(router), **{AT_ADMIN: "1", "x-tercet-at-admin": "true"}) as client:
        assert (await client.get(ENGINES, params={AT_ADMIN: "1"})).status_code == 404


# ---- listening -----------------------------------------------------------------------------------------------


async def test_a_file_serves_its_owner_alone_and_goes(router: LiveRouter, tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    async with admin_served(app_of(router, keys=("client",)), AdminAddress(path=str(path))), at_file(path) as client:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (await client.get(ENGINES)).status_code == 200, "though clients have keys, and there is no admin key"
        assert (await client.get("/health")).status_code == 200
        for page in ({"origin": "http://evil.example"}, {"host": "evil.example"}, {"x-forwarded-for": "10.0.0.1"}):
            assert (await client.get(ENGINES, headers=page)).status_code == 403, page
        for method, clients in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("OPTIONS", "/v1/models")):
            assert (await client.request(method, clients)).status_code == 404
    assert not path.exists()


async def test_the_file_of_a_router_that_was_killed_is_replaced(router: LiveRouter, tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    async with admin_served(app_of(router), AdminAddress(path=str(path))), at_file(path) as client:
        assert (await client.get(ENGINES)).status_code == 200


async def test_the_file_of_another_router_stays(router: LiveRouter, tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    async with admin_served(app_of(router), AdminAddress(path=str(path))), at_file(path) as client:
        with pytest.raises(BadRequest, match="admin-listen"):
            async with admin_served(app_of(router), AdminAddress(path=str(path))):
                pass
        assert (await client.get(ENGINES)).status_code == 200


async def test_a_file_that_is_no_socket_stays(router: LiveRouter, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(BadRequest, match="admin-listen"):
        async with admin_served(app_of(router), AdminAddress(path=str(path))):
            pass
    assert path.read_text() == "mine"


async def test_a_port_that_is_taken_is_told(router: LiveRouter) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(BadRequest, match="admin-listen"):
        async with admin_served(app_of(router), AdminAddress("127.0.0.1", taken.getsockname()[1])):
            pass


async def test_the_small_server_serves_both_addresses(router: LiveRouter, checkpoint: Path) -> None:
    port, admin_port = free_ports("127.0.0.1", 2)
    config = RouterConfig(
        engines=ENGINE, openai_layer="small", model=str(checkpoint), served_model_name="m", port=port,
        admin_listen=f"127.0.0.1:{admin_port}",
    )  # fmt: skip
    shutdown = Shutdown(timeout_s=0)
    pooling = PoolingServers((), "", None, None, router.metrics.pooling_server)
    gate = Gate(config.limits, router.fleet, router.metrics)
    serving = asyncio.create_task(
        serve_small(config, router.shared, gate, 1000, shutdown, pooling, NamedFiles(), lambda: None)
    )
    try:
        async with httpx.AsyncClient() as client:
            found = {}
            for at, path in ((port, "/v1/models"), (port, ENGINES), (admin_port, ENGINES), (admin_port, "/v1/models")):
                url = f"http://127.0.0.1:{at}{path}"
                while True:
                    try:
                        found[at, path] = (await client.get(url)).status_code
                        break
                    except httpx.ConnectError:
                        assert not serving.done()
                        await asyncio.sleep(0.01)
    finally:
        shutdown.hurry()
        await serving
    assert list(found.values()) == [200, 404, 200, 404]
    with socket.create_server(("127.0.0.1", admin_port)):
        pass  # its port is free again


@pytest.mark.processes
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("between", [0.0, 0.05, 0.2, 0.5])
def test_a_second_signal_leaves_no_socket_file(tmp_path: Path, between: float) -> None:
    """Whether running requests are waited for, or all has ended and files are removed: it does not break that off."""
    socket_file, (engine_port, port) = tmp_path / "admin", free_ports("127.0.0.1", 2)
    engine = ("engine", "--simulate", PROFILE, "--name", "e", "--port", str(engine_port), "--model", MODEL)
    command = [
        sys.executable, "-m", "tercet.cli", "router", "--engine", f"http://127.0.0.1:{engine_port},name=e",
        "--model", MODEL, "--port", str(port), "--openai-layer", "small", "--program", "data_parallel",
        "--admin-listen", f"unix:{socket_file}",
    ]  # fmt: skip
    log = tmp_path / "router.log"
    with running(tmp_path / "e.log", *engine), log.open("w") as written:
        process = subprocess.Popen(command, stdout=written, stderr=written)
        try:
            wait_for(f"http://127.0.0.1:{port}/health")
            assert socket_file.is_socket()
            process.send_signal(signal.SIGTERM)
            time.sleep(between)
            process.send_signal(signal.SIGTERM)
            # The last part of its end, when nothing is left to remove, it may break off.
            assert process.wait(60) in (0, -signal.SIGTERM), log.read_text()
        finally:
            process.kill()
            process.wait()
    assert not socket_file.exists()


# ---- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:8001", AdminAddress("127.0.0.1", 8001)),
        ("[::1]:8001", AdminAddress("::1", 8001)),
        ("localhost:8001", AdminAddress("localhost", 8001)),
        ("unix:/run/tercet.sock", AdminAddress(path="/run/tercet.sock")),
    ],
)
def test_addresses(text: str, expected: AdminAddress) -> None:
    assert AdminAddress.of(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text",
    ["", "8001", ":8001", "::1:8001", "[::1", "[x]:8001", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:70000", "a:٣",
     "unix:", "unix:relative", "unix:/" + "x" * 107, "/run/tercet.sock", "127.0.0.1:-1", "127.0.0.1:8000"],
)  # fmt: skip
def test_what_is_no_address_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(BadRequest, match="admin-listen"):
        RouterConfig(engines=ENGINE, admin_listen=text, port=8000)


def test_it_is_no_port_of_token_streams() -> None:
    with pytest.raises(BadRequest, match="admin-listen"):
        RouterConfig(engines=ENGINE, admin_listen="127.0.0.1:9001", stream_port=9000, workers=2)


@pytest.mark.parametrize(
    ("address", "key", "refused"),
    [("0.0.0.0:8001", "", True), ("0.0.0.0:8001", "k", False), ("127.0.0.1:8001", "", False), ("unix:/x", "", False)],
)
def test_without_an_admin_key_it_is_this_machine_s(address: str, key: str, refused: bool) -> None:
    config = RouterConfig(engines=ENGINE, admin_listen=address, admin_key=key)
    keys = RouterKeys(config, ())
    if refused:
        with pytest.raises(BadRequest, match="admin-listen"):
            keys.require_private_admin(config.admin_address)
    else:
        keys.require_private_admin(config.admin_address)
