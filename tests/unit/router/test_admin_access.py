"""Who may show and change a fleet: not clients, not web pages, and without an admin key this machine alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from tercet.fleet.admission import Gate
from tercet.protocol import BadRequest
from tercet.router.admin.admin_routes import routes as admin_routes
from tercet.router.observe.metrics import Metrics
from tercet.router.router_app import RouterApp
from tercet.settings import EngineAddress, Limits, RouterConfig
from tercet.wire.callers import BearerKeys
from tercet.wire.serving.server_access import RouterKeys, is_admin_path

from .conftest import LiveRouter

DRAIN = "/tercet/v1/engines/d/drain"
PROGRAM = b'{"program": "data_parallel"}'
JSON = {"content-type": "application/json"}
THIS_MACHINE = ("127.0.0.1", 5000)


def client_of(
    router: LiveRouter, keys: Sequence[str] = (), admin_keys: Sequence[str] = (), peer: tuple[str, int] = THIS_MACHINE
) -> httpx.AsyncClient:
    front = router.application(*keys, admin_keys=admin_keys)
    transport = httpx.ASGITransport(front, client=peer)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# ---- pages of strangers --------------------------------------------------------------------------------------

PAGES: list[Mapping[str, str]] = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:8001"},
    {"origin": "https://127.0.0.1:8000.evil.example"},
    {"origin": "http://127.0.0.1:8000@evil.example"},
    {"origin": "file://"},
    {"origin": ""},
    {"origin": "chrome-extension://abc"},
    {"origin": "http://127.0.0.1:8000, http://evil.example"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "Cross-Site"},
    {"sec-fetch-site": ""},
]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [(), ("admin",)])
@pytest.mark.parametrize("page", PAGES)
async def test_a_page_of_another_origin_is_refused_whatever_it_shows(
    router: LiveRouter, page: Mapping[str, str], keys: Sequence[str]
) -> None:
    async with client_of(router, admin_keys=keys) as client:
        for method, path, body in (
            ("POST", DRAIN, b""),
            ("PUT", "/tercet/v1/program", PROGRAM),
            ("GET", "/tercet/v1/status", b""),
        ):
            headers = {**(JSON if body else {}), **bearer("admin"), **page}
            answer = await client.request(method, path, content=body, headers=headers)
            assert answer.status_code == 403, (method, page)
            assert answer.json()["error"]["param"] in ("origin", "sec-fetch-site")
    assert not router.fleet.member("d").draining
    assert router.service.routing.current.number == 1


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.5", "a@localhost",
     "localhost:x", "", "[::1", "0.0.0.0", "localhost, evil.example", "::1", "localhost/evil", "localhost?x"],
)  # fmt: skip
async def test_a_name_that_is_made_to_point_here_is_refused(router: LiveRouter, host: str) -> None:
    async with client_of(router) as client:
        answer = await client.put("/tercet/v1/program", content=PROGRAM, headers={**JSON, "host": host})
    assert (answer.status_code, answer.json()["error"]["param"]) == (403, "host")
    assert router.service.routing.current.number == 1


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.3.2.1", "[::1]:8000", "[::1]"])
async def test_this_machine_needs_no_key(router: LiveRouter, host: str) -> None:
    async with client_of(router) as client:
        own = {"host": host, "origin": f"http://{host.lower()}", "sec-fetch-site": "same-origin"}
        for headers in ({"host": host}, own):
            answer = await client.put("/tercet/v1/program", content=PROGRAM, headers={**JSON, **headers})
            assert answer.status_code == 200, answer.text


async def test_two_hosts_are_none(router: LiveRouter) -> None:
    headers = [("host", "localhost"), ("host", "evil.example"), ("content-type", "application/json")]
    async with client_of(router) as client:
        answer = await client.put("/tercet/v1/program", content=PROGRAM, headers=headers)
    assert answer.status_code == 403


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
                                  "text/plain; x=application/json", "application/jsonp", "", None])  # fmt: skip
@pytest.mark.parametrize("keys", [(), ("admin",)])
async def test_bodies_are_json_only(router: LiveRouter, kind: str | None, keys: Sequence[str]) -> None:
    said = {} if kind is None else {"content-type": kind}
    async with client_of(router, admin_keys=keys) as client:
        answer = await client.put("/tercet/v1/program", content=PROGRAM, headers={**said, **bearer("admin")})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
        if kind:
            answer = await client.post(DRAIN, headers={"content-type": kind, **bearer("admin")})
            assert answer.status_code == 415
    assert not router.fleet.member("d").draining


async def test_no_body_needs_no_type_and_charsets_are_fine(router: LiveRouter) -> None:
    async with client_of(router) as client:
        assert (await client.post(DRAIN)).status_code == 200
        bare = {"content-type": "application/octet-stream"}  # as aiohttp says where it sends none
        assert (await client.post(DRAIN, headers=bare)).status_code == 200
        assert (await client.put("/tercet/v1/program", content=PROGRAM, headers=bare)).status_code == 415
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        assert (await client.put("/tercet/v1/program", content=PROGRAM, headers=headers)).status_code == 200


# ---- other machines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", ["10.0.0.9", "192.168.1.4", "::ffff:10.0.0.9", "fe80::1%eth0"])
async def test_without_a_key_other_machines_are_refused(router: LiveRouter, peer: str) -> None:
    async with client_of(router, peer=(peer, 5000)) as client:
        answer = await client.get("/tercet/v1/engines")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
        assert "TERCET_ADMIN_KEY" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["x-forwarded-for", "Forwarded", "Via", "X-Real-IP", "x-forwarded-host"])
async def test_without_a_key_nobody_behind_a_proxy_is_answered(router: LiveRouter, name: str) -> None:
    async with client_of(router) as client:
        assert (await client.get("/tercet/v1/engines", headers={name: "127.0.0.1"})).status_code == 403


@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
async def test_loopback_is_this_machine(router: LiveRouter, peer: str) -> None:
    async with client_of(router, peer=(peer, 5000)) as client:
        assert (await client.get("/tercet/v1/engines")).status_code == 200


# ---- keys ----------------------------------------------------------------------------------------------------


async def test_a_clients_key_is_no_admins_and_an_admins_no_clients(router: LiveRouter) -> None:
    async with client_of(router, keys=("client",), admin_keys=("admin", "next")) as client:
        for key, status in (("client", 401), ("admin", 200), ("next", 200), ("other", 401)):
            assert (await client.get("/tercet/v1/engines", headers=bearer(key))).status_code == status
        assert (await client.get("/tercet/v1/engines")).status_code == 401
        assert (await client.get("/openapi.json", headers=bearer("admin"))).status_code == 401
        assert (await client.get("/openapi.json", headers=bearer("client"))).status_code == 200


async def test_with_an_admin_key_any_machine_and_name_will_do(router: LiveRouter) -> None:
    async with client_of(router, admin_keys=("admin",), peer=("10.0.0.9", 1)) as client:
        headers = {**bearer("admin"), "host": "fleet.example", "x-forwarded-for": "10.1.1.1"}
        assert (await client.get("/tercet/v1/engines", headers=headers)).status_code == 200


async def test_where_clients_have_keys_admins_need_one_too(router: LiveRouter) -> None:
    async with client_of(router, keys=("client",)) as client:
        for headers in ({}, bearer("client")):
            answer = await client.get("/tercet/v1/engines", headers=headers)
            assert answer.status_code == 401
            assert "TERCET_ADMIN_KEY" in answer.json()["error"]["message"]


async def test_a_key_that_is_both_opens_nothing_of_admins(router: LiveRouter) -> None:
    async with client_of(router, keys=("both",), admin_keys=("both",)) as client:
        assert (await client.get("/tercet/v1/engines", headers=bearer("both"))).status_code == 401


@pytest.mark.parametrize("path", ["/tercet/v1", "/tercet/v1/", "/tercet/v1/x", "/v1/load_lora_adapter",
                                  "/v1/load_lora_adapter/", "/v1/unload_lora_adapter"])  # fmt: skip
def test_what_is_for_admins(path: str) -> None:
    assert is_admin_path(path)


@pytest.mark.parametrize("path", ["/v1/models", "/tercet/v10", "/tercet", "/health"])
def test_what_is_not(path: str) -> None:
    assert not is_admin_path(path)


async def test_a_route_that_the_router_has_not_looked_at_does_not_answer(router: LiveRouter) -> None:
    front = router.application()
    transport = httpx.ASGITransport(front._app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/tercet/v1/engines")).status_code == 403


async def test_a_websocket_needs_a_clients_key(router: LiveRouter, metrics: Metrics) -> None:
    served = list[Any]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        served.append(scope)

    front = RouterApp(app, None, Gate(Limits(), router.fleet, metrics), ("key",), lambda _: None, 1)
    sent = list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    await front(scope, lambda: None, send)  # type: ignore[arg-type]
    assert (sent, served) == ([{"type": "websocket.close", "code": 1008}], [])
    await front({**scope, "headers": [(b"authorization", b"Bearer key")]}, lambda: None, send)  # type: ignore[arg-type]
    assert len(served) == 1


# ---- files of keys -------------------------------------------------------------------------------------------


def config(**given: Any) -> RouterConfig:
    return RouterConfig(engines=(EngineAddress("e", "http://e"),), **given)


def opens(keys: BearerKeys, key: str) -> bool:
    return keys.fits(f"Bearer {key}")


async def test_files_of_keys_are_read_again(tmp_path: Path) -> None:
    clients, admins = tmp_path / "clients", tmp_path / "admins"
    clients.write_text("# team a\none\n\ntwo\r\n")
    admins.write_text("root")
    keys = RouterKeys(config(api_key_file=str(clients), admin_key_file=str(admins), admin_key="told"), ["given"])
    assert all(opens(keys.clients, key) for key in ("one", "two", "given"))
    assert all(opens(keys.admins, key) for key in ("root", "told"))
    clients.write_text("two\nthree\n")
    await keys.look()
    assert [opens(keys.clients, key) for key in ("one", "two", "three", "given")] == [False, True, True, True]


async def test_an_emptied_file_lets_nobody_in_and_a_lost_one_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "clients"
    file.write_text("one\n")
    keys = RouterKeys(config(api_key_file=str(file)), [])
    os.unlink(file)
    await keys.look()
    assert opens(keys.clients, "one")
    file.write_text("\n")
    await keys.look()
    assert keys.clients
    assert not any(opens(keys.clients, key) for key in ("one", ""))
    file.write_text("two words\n")
    await keys.look()
    assert not opens(keys.clients, "one")


@pytest.mark.parametrize(
    "content", [b"", b"\n \n", b"# none\n", b"two words\n", b"\xff\xfe\n", "schl\u00fcssel\n".encode()]
)
def test_a_file_without_a_usable_key_is_refused_at_the_start(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "keys").write_bytes(content)
    for name in ("api_key_file", "admin_key_file"):
        with pytest.raises(BadRequest, match=name.replace("_", "-")) as refused:
            RouterKeys(config(**{name: str(tmp_path / "keys")}), [])
        assert "words" not in str(refused.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "none", tmp_path / "pipe", Path("/proc/1/fd/0")):
        with pytest.raises(BadRequest):
            RouterKeys(config(api_key_file=str(path)), [])


def test_a_clients_key_must_not_be_the_admins(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="admin-key"):
        RouterKeys(config(admin_key="same"), ["same"])


@pytest.mark.parametrize(
    ("clients", "admins", "shown", "status"),
    [
        ((), (), None, 200),  # this machine
        (("client",), (), "client", 403),
        (("client",), ("admin",), "client", 403),
        (("client",), ("admin",), "admin", 200),
        (("client",), ("admin",), "other", 401),
        (("client",), ("admin",), None, 401),
        ((), ("admin",), None, 403),
        ((), ("admin",), "admin", 200),
    ],
)
async def test_only_administrators_see_traces(
    router: LiveRouter, clients: Sequence[str], admins: Sequence[str], shown: str | None, status: int
) -> None:
    headers = {"x-tercet-trace": "1", **(bearer(shown) if shown else {})}
    async with client_of(router, keys=clients, admin_keys=admins) as client:
        answer = await client.get("/openapi.json", headers=headers)
        assert answer.status_code == status
        assert status != 403 or answer.json()["error"]["param"] == "x-tercet-trace"
        if not clients:
            for proxied in ({"via": "1.1 tercet"}, {"x-forwarded-for": "10.0.0.9"}, {"sec-fetch-site": "cross-site"}):
                answer = await client.get("/openapi.json", headers={"x-tercet-trace": "1", **proxied})
                assert answer.status_code == 403, proxied
        headers = {"x-tercet-trace": "0", **(bearer("client") if clients else {})}
        assert (await client.get("/openapi.json", headers=headers)).status_code == 200


# ---- control characters in a path ----------------------------------------------------------------------------

NAMED = [
    ("PUT", "/tercet/v1/members/{}"), ("DELETE", "/tercet/v1/members/{}/1"), ("DELETE", "/tercet/v1/members/d/{}"),
    ("DELETE", "/tercet/v1/engines/{}"), ("POST", "/tercet/v1/engines/{}/drain"),
    ("DELETE", "/tercet/v1/engines/{}/drain"), ("PUT", "/tercet/v1/engines/{}/role"), ("GET", "/tercet/v1/traces/{}"),
    ("PUT", "/tercet/v1/adapters/{}"), ("DELETE", "/tercet/v1/adapters/{}"),
    ("POST", "/tercet/v1/sequences/{}/move"), ("GET", "/tercet/v1/engines{}"), ("PUT", "/tercet/v1/program{}"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), NAMED)
async def test_a_path_with_control_characters_is_refused(router: LiveRouter, method: str, path: str) -> None:
    state = router.shared.state
    async with client_of(router) as client:
        for odd in ("d%0A", "%0Ad", "d%0D%0A", "d%00", "d%7F", "d%1F"):
            answer = await client.request(method, path.format(odd), content=b"{}", headers=JSON)
            assert answer.status_code == 400, odd
            assert "control characters" in answer.text
    assert router.shared.state is state


def test_every_admin_route_with_a_name_is_tried() -> None:
    routes = {
        (method, re.sub(r"\{[^}]*\}", "{}", route.path))
        for route in admin_routes.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if "{" in route.path
    }
    tried = {(method, path.replace("/members/{}/1", "/members/{}/{}")) for method, path in NAMED}
    assert routes - tried == set()
