"""The page over HTTP: its files and their headers, who may see the stream, prefixes, and pages of other origins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.types import Message

from tercet.router.page import page_app
from tercet.router.page.page_app import FOLDER, POLICY, SAFETY, page_files, page_of
from tercet.router.page.records import Frame
from tercet.router.serve.shutdown import Shutdown
from tercet.settings import RouterSettings
from tercet.wire.serving.server_access import AT_ADMIN, RouterKeys
from tercet_lab.commands.run_page import RecordedPage
from tests.longest_wait import LONGEST_WAIT_S, until
from tests.unit.router.conftest import LiveRouter

ADMIN, CLIENT = "the-admin-key", "a-clients-key"


def app_of(router: LiveRouter, *, admin_key: str = "", keys: tuple[str, ...] = (), apart: bool = False) -> Any:
    known = RouterKeys(RouterSettings(admin_key=admin_key), keys)
    page = page_of(router.shared, known, "m", Shutdown(0), apart)
    return router.application(*keys, admin_keys=(admin_key,) if admin_key else (), page=page)


def client_of(app: Any, **more: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", **more)


class Watching:
    """A GET of the stream, as a server has it: what was sent so far."""

    def __init__(self, app: Any, headers: dict[str, str] | None = None, **scope: Any) -> None:
        shown = {"host": "localhost", **(headers or {})}
        self._scope = {
            "type": "http", "method": "GET", "path": "/tercet/stream", "query_string": b"", "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in shown.items()],
            "client": ("127.0.0.1", 5), **scope,
        }  # fmt: skip
        self._left = asyncio.Event()
        self.sent: list[Message] = []
        self._came = asyncio.Event()
        self.task = asyncio.ensure_future(app(self._scope, self._receive, self._send))

    async def _receive(self) -> Message:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        self._came.set()

    async def first(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and the first part of the body."""
        async with asyncio.timeout(LONGEST_WAIT_S):
            while len(self.sent) < 2:
                self._came.clear()
                await self._came.wait()
        headers = {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}
        return self.sent[0]["status"], headers, self.sent[1]["body"]

    async def leave(self) -> None:
        self._left.set()
        async with asyncio.timeout(LONGEST_WAIT_S):
            await self.task


@asynccontextmanager
async def watching(app: Any, headers: dict[str, str] | None = None, **scope: Any) -> AsyncGenerator[Watching]:
    found = Watching(app, headers, **scope)
    try:
        yield found
    finally:
        await found.leave()


async def status_of(app: Any, headers: dict[str, str] | None = None, **scope: Any) -> tuple[int, str]:
    """Of the stream: its status, and whose view it is."""
    async with watching(app, headers, **scope) as found:
        status, shown, _ = await found.first()
        return status, shown.get(page_app.VIEW_HEADER, "")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# ---- files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/tercet/", *(f"/tercet/{name}" for name in sorted(page_files()) if name)])
async def test_files_are_open_and_have_the_headers_that_keep_them_safe(router: LiveRouter, path: str) -> None:
    async with client_of(app_of(router, admin_key=ADMIN, keys=(CLIENT,))) as client:
        answer = await client.get(path)
        assert answer.status_code == 200
        assert answer.content == page_files()[path.removeprefix("/tercet/")].content
        assert {name: answer.headers[name] for name in SAFETY} == SAFETY
        again = await client.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        head = await client.head(path)
        assert (head.status_code, head.content, head.headers["content-length"]) == (
            200, b"", answer.headers["content-length"],
        )  # fmt: skip


def test_the_policy_lets_nothing_in_from_elsewhere() -> None:
    said = {words[0]: " ".join(words[1:]) for words in (part.split() for part in POLICY.split(";"))}
    assert said["default-src"] == "'none'"
    assert said["frame-ancestors"] == "'none'"
    assert set(said.values()) == {"'none'", "'self'"}


def test_no_file_names_another_place_or_has_a_script_or_style_in_it() -> None:
    for path in (each for each in FOLDER.rglob("*") if each.is_file()):
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        for word in ("http:", "https:", "innerHTML", "eval(", "document.write", "style=", 'onclick="', "@import"):
            assert word not in text, f"{path.name} has {word}"


def test_every_file_is_installed() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["*"]
    for path in (each for each in FOLDER.rglob("*") if each.is_file()):
        assert f"*{path.suffix}" in patterns


async def test_the_page_without_a_slash_is_the_page_with_one_wherever_a_proxy_puts_it(router: LiveRouter) -> None:
    async with client_of(app_of(router)) as client:
        answer = await client.get("/tercet")
        assert (answer.status_code, answer.headers["location"]) == (307, "tercet/")


async def test_a_prefix_before_the_page_is_no_part_of_its_paths(router: LiveRouter) -> None:
    transport = httpx.ASGITransport(app_of(router), root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/llm/tercet/")).content == page_files()[""].content
        assert (await client.get("/llm/tercet/about")).json()["mode"] == "live"
        assert (await client.get("/llm/tercet/v1/engines")).status_code == 200


@pytest.mark.parametrize("path", ["x", "js", "js/", "js/%2e%2e/%2e%2e/page_app.py", "index.html", "%00", "v2"])
async def test_there_is_nothing_else(router: LiveRouter, path: str) -> None:
    async with client_of(app_of(router)) as client:
        answer = await client.get(f"/tercet/{path}")
        assert answer.status_code == 404
        assert answer.headers["content-security-policy"] == POLICY


@pytest.mark.parametrize("path", ["", "/", "/stream", "/about", "/page.css"])
async def test_only_reading_is_for_the_page(router: LiveRouter, path: str) -> None:
    async with client_of(app_of(router)) as client:
        assert (await client.post(f"/tercet{path}")).status_code == 405


@pytest.mark.parametrize("path", ["/tercetx", "/v1/tercet", "/tercet/v1/engines", "/tercet/v1"])
async def test_other_paths_are_the_routers(router: LiveRouter, path: str) -> None:
    async with client_of(app_of(router)) as client:
        assert "content-security-policy" not in (await client.get(path)).headers


# ---- who sees the stream -------------------------------------------------------------------------------------


async def test_this_machine_sees_it_where_no_key_is_set(router: LiveRouter) -> None:
    app = app_of(router)
    async with watching(app) as found:
        status, headers, body = await found.first()
        assert (status, headers["content-type"], headers["cache-control"]) == (200, "text/event-stream", "no-store")
        assert headers["content-security-policy"] == POLICY
        frame = msgspec.json.decode(body.split(b"\n\n")[0].removeprefix(b"data: "), type=Frame)
        assert frame.about is not None
        assert (frame.whole, frame.about.model, frame.about.shares[0].program) == (True, "m", "disaggregated")
    assert not router.service.observers or await _becomes_quiet(router)


async def _becomes_quiet(router: LiveRouter) -> bool:
    await until(lambda: not router.service.observers)
    return True


async def test_other_machines_do_not(router: LiveRouter) -> None:
    assert await status_of(app_of(router), client=("10.0.0.9", 5)) == (403, "")
    assert await status_of(app_of(router), {"host": "rebound.example"}) == (403, "")
    assert await status_of(app_of(router), {"x-forwarded-for": "10.0.0.9"}) == (403, "")


async def test_with_keys_each_key_has_its_view(router: LiveRouter) -> None:
    app = app_of(router, admin_key=ADMIN, keys=(CLIENT,))
    assert await status_of(app) == (401, "")
    assert await status_of(app, bearer("wrong")) == (401, "")
    assert await status_of(app, bearer(CLIENT), client=("10.0.0.9", 5)) == (200, "client")
    assert await status_of(app, bearer(ADMIN), client=("10.0.0.9", 5)) == (200, "admin")


async def test_with_an_admin_key_alone_clients_see_nothing(router: LiveRouter) -> None:
    app = app_of(router, admin_key=ADMIN)
    assert await status_of(app) == (401, "")
    assert await status_of(app, bearer(ADMIN)) == (200, "admin")


@pytest.mark.parametrize(
    "headers",
    [{"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}, {"origin": "https://elsewhere.example"},
     {"origin": "null"}],
)  # fmt: skip
@pytest.mark.parametrize("key", [ADMIN, CLIENT])
async def test_pages_of_other_origins_see_nothing_and_change_nothing(
    router: LiveRouter, headers: dict[str, str], key: str
) -> None:
    app = app_of(router, admin_key=ADMIN, keys=(CLIENT,))
    assert await status_of(app, headers | bearer(key)) == (403, "")
    async with client_of(app, headers={**headers, **bearer(key), "content-type": "application/json"}) as client:
        assert (await client.post("/tercet/v1/engines/d/drain")).status_code == 403
    assert not router.fleet.member("d").draining


async def test_the_pages_own_requests_change_the_fleet(router: LiveRouter) -> None:
    own = {"origin": "http://localhost", "sec-fetch-site": "same-origin", "content-type": "application/json"}
    async with client_of(app_of(router, admin_key=ADMIN), headers={**own, **bearer(ADMIN)}) as client:
        assert (await client.post("/tercet/v1/engines/d/drain")).status_code == 200
    assert router.fleet.member("d").draining


async def test_where_admin_routes_are_elsewhere_the_page_says_so(router: LiveRouter) -> None:
    app = app_of(router, keys=(CLIENT,), admin_key=ADMIN, apart=True)
    async with client_of(app) as client:
        assert "--admin-listen" in (await client.get("/tercet/about")).json()["why_no_changes"]
    assert await status_of(app, bearer(CLIENT)) == (200, "client")

    async def at_admin(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, AT_ADMIN: True}, receive, send)

    async with client_of(at_admin) as client:
        assert (await client.get("/tercet/about")).json()["why_no_changes"] == ""
    assert await status_of(at_admin, bearer(ADMIN)) == (200, "admin")


@pytest.mark.slow
async def test_a_viewer_that_takes_nothing_is_dropped(router: LiveRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_app, "SEND_SECONDS", 0.05)

    class Stuck(Watching):
        async def _send(self, message: Message) -> None:
            self.sent.append(message)
            if len(self.sent) > 2:
                await asyncio.Event().wait()

    stuck = Stuck(app_of(router))
    async with asyncio.timeout(LONGEST_WAIT_S):
        await stuck.task
    assert stuck.sent[-1].get("more_body", False)  # no end: the server closes the connection
    assert await _becomes_quiet(router)


# ---- a recorded run ------------------------------------------------------------------------------------------


async def test_a_recorded_run_is_served_to_this_machine_alone() -> None:
    app = RecordedPage(b'{"timelines": {}}')
    async with client_of(app) as client:
        assert (await client.get("/about")).json()["mode"] == "recorded"
        assert (await client.get("/run.json")).content == b'{"timelines": {}}'
        page = await client.get("/")
        assert (page.content, page.headers["content-security-policy"]) == (page_files()[""].content, POLICY)
        assert (await client.get("/stream")).status_code == 404
        assert (await client.post("/run.json")).status_code == 405
        assert (await client.get("/run.json", headers={"host": "rebound.example"})).status_code == 403
        assert (await client.get("/run.json", headers={"origin": "http://elsewhere.example"})).status_code == 403


async def test_a_connection_that_breaks_before_the_first_part_leaves_no_viewer(router: LiveRouter) -> None:
    class Broken(Watching):
        async def _send(self, message: Message) -> None:
            raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await Broken(app_of(router)).task
    assert await _becomes_quiet(router)
