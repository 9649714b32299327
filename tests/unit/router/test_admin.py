"""The router's own routes: programs and engines over HTTP, what they refuse, and who may call them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from starlette.routing import Route

from tercet.fleet import FleetView
from tercet.protocol import EngineUnreachable, Saturated
from tercet.protocol.wire import API_PREFIX
from tercet.router import admin
from tercet.router.admin.admin_routes import TercetRoute
from tests.longest_wait import until

from .conftest import Engine, LiveRouter


async def test_a_program_is_shown_set_and_shown(router: LiveRouter, programs: str) -> None:
    async with router.client() as client:
        first = (await client.get("/program")).json()
        assert (first["version"], first["program"], first["args"]) == (1, "disaggregated", {})
        assert (first["previous"], first["returned"]) == (None, None)
        answer = await client.put(
            "/program", json={"program": "balanced", "args": {"balance_ratio": 0.5, "min_send": 1}}
        )
        assert answer.status_code == 200
        assert (await router.ask())[0] == "balanced"
        body = {"split": [{"program": "balanced", "weight": 3}, {"program": f"{programs}:good", "weight": 1}]}
        shown = (await client.put("/program", json=body)).json()
        assert shown == (await client.get("/program")).json()
        assert shown["version"] == 3
        assert [share["weight"] for share in shown["split"]] == [3, 1]
        assert shown["previous"]["version"] == 2
        assert shown["previous"]["args"] == {"balance_ratio": 0.5, "min_send": 1}


async def test_a_failing_program_is_told(router: LiveRouter, programs: str) -> None:
    async with router.client() as client:
        await client.put("/program", json={"program": f"{programs}:raises"})
        await router.ask()
        assert (await client.get("/program")).json()["failures_in_a_row"] == {f"{programs}:raises": 1}
        for _ in range(2):
            await router.ask()
        shown = (await client.get("/program")).json()
    assert (shown["version"], shown["program"], shown["failures_in_a_row"]) == (1, "disaggregated", {})
    assert shown["returned"] == {
        "from_version": 2,
        "to_version": 1,
        "program": f"{programs}:raises",
        "failures": 3,
        "error": "ValueError: oh no",
    }


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b'{"program": "nowhere"}', "program"),
        (b'{"program": "balanced", "args": {"balance_ratio": "much"}}', "args"),
        (b'{"program": "balanced", "args": {"ratio": 1}}', "args"),
        (b'{"program": "balanced", "nonsense": 1}', "nonsense"),
        (b'{"split": [{"program": "balanced", "weight": -1}]}', "split"),
    ],
)
async def test_a_refused_program_leaves_the_other_one(router: LiveRouter, body: bytes, param: str | None) -> None:
    async with router.client() as client:
        answer = await client.put("/program", content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert answer.json()["error"]["type"] == "BadRequest"
        assert (await client.get("/program")).json()["version"] == 1


# ---- engines -------------------------------------------------------------------------------------------------


async def test_an_engine_joins_serves_and_leaves(router: LiveRouter) -> None:
    late = router.engines["http://late"] = Engine("late")
    async with router.client() as client:
        answer = await client.post("/engines", json={"name": "late", "url": "http://late", "role": "decode"})
        assert (answer.status_code, answer.json()["name"], answer.json()["role"]) == (201, "late", "decode")
        await client.post("/engines/d/drain")
        assert (await router.ask())[1] == [100, 101, 102]
        assert "start_generate" in late.verbs
        assert router.engine("d").calls == []
        assert (await client.delete("/engines/late")).status_code == 200
        assert [engine["name"] for engine in (await client.get("/engines")).json()] == ["p", "d"]
        await router.has_everything_back()
        await until(lambda: late.closed)


async def test_a_removed_engine_finishes_and_is_closed_then(router: LiveRouter) -> None:
    leaving = router.engine("d")
    leaving.pause.clear()
    asking = [asyncio.ensure_future(router.ask()) for _ in range(3)]
    while len(leaving.calls) < 3:
        await asyncio.sleep(0)
    async with router.client() as client:
        assert (await client.delete("/engines/d")).json()["in_flight"] == 3
        assert [engine["name"] for engine in (await client.get("/engines")).json()] == ["p"]
    assert not leaving.closed
    asking[0].cancel()
    leaving.pause.set()
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert found[1:] == [("disaggregated", [100, 101, 102])] * 2
    assert await router.has_everything_back()
    while not leaving.closed:
        await asyncio.sleep(0)


async def test_a_drained_engine_finishes_and_comes_back(router: LiveRouter) -> None:
    engine = router.engine("d")
    engine.pause.clear()
    asking = asyncio.ensure_future(router.ask())
    while not engine.calls:
        await asyncio.sleep(0)
    async with router.client() as client:
        drained = (await client.post("/engines/d/drain")).json()
        assert (drained["draining"], drained["in_flight"]) == (True, 1)
        assert (await router.ask())[0] == "disaggregated"
        assert router.engine("p").verbs[-1] == "start_generate", "whoever is left serves, whatever its role"
        engine.pause.set()
        assert (await asking)[0] == "disaggregated"
        assert (await client.delete("/engines/d/drain")).json()["draining"] is False
    assert (await router.ask())[0] == "disaggregated"


async def test_roles_change(router: LiveRouter) -> None:
    async with router.client() as client:
        await client.put("/engines/d/role", json={"role": "prefill"})
        await client.put("/engines/p/role", json={"role": "decode"})
    await router.ask()
    assert router.engine("p").verbs == ["prep_recv", "start_generate"]
    assert router.engine("d").verbs == ["remote_send"]


@pytest.mark.parametrize(
    ("body", "status", "names"),
    [
        ({"name": "p", "url": "http://new"}, 409, "name"),
        ({"name": "new", "url": "http://p"}, 409, "url"),
        ({"name": "new", "url": "http://other-model"}, 400, "serves the model other, and this fleet serves m"),
        ({"name": "new", "url": "http://short"}, 400, "max_model_len 999"),
        ({"name": "new", "url": "http://gone"}, 503, "does not answer"),
        ({"name": "new", "url": "nowhere"}, 400, "url"),
        ({"name": "a/b", "url": "http://new"}, 400, "name"),
        ({"name": "", "url": "http://new"}, 400, "name"),
        ({"name": "new", "url": "http://new", "role": "cook"}, 400, "role"),
        ({"name": "new", "url": "http://new", "rolle": "both"}, 400, "rolle"),
        ({"name": "new"}, 400, "url"),
    ],
)
async def test_engines_that_may_not_join(router: LiveRouter, body: Any, status: int, names: str) -> None:
    new = {
        "new": Engine("new"),
        "other-model": Engine("new", model="other"),
        "short": Engine("new", max_model_len=999),
        "gone": Engine("new"),
    }
    new["gone"].gone = True
    router.engines |= {f"http://{name}": engine for name, engine in new.items()}
    async with router.client() as client:
        answer = await client.post("/engines", json=body)
        assert answer.status_code == status
        assert names in answer.json()["error"]["message"]
        assert [engine["name"] for engine in (await client.get("/engines")).json()] == ["p", "d"]
    asked = router.engines.get(body.get("url", ""))
    assert asked is None or asked in (router.engine("p"), new["new"]) or asked.closed


async def test_one_name_joins_once_however_many_ask(router: LiveRouter) -> None:
    router.engines |= {f"http://new-{i}": Engine("new") for i in range(5)}
    async with router.client() as client:
        bodies = [{"name": "new", "url": f"http://new-{i}"} for i in range(5)]
        answers = await asyncio.gather(*(client.post("/engines", json=body) for body in bodies))
    assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409, 409]
    assert [member.name for member in router.fleet.members] == ["p", "d", "new"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/engines/x"),
        ("POST", "/engines/x/drain"),
        ("DELETE", "/engines/x/drain"),
        ("PUT", "/engines/x/role"),
    ],
)
async def test_unknown_engines(router: LiveRouter, method: str, path: str) -> None:
    async with router.client() as client:
        answer = await client.request(method, path, json={"role": "both"})
    assert answer.status_code == 404
    assert "it has p, d" in answer.json()["error"]["message"]


async def test_with_no_engine_left_requests_are_refused_and_the_next_one_serves(router: LiveRouter) -> None:
    async with router.client() as client:
        for name in ("p", "d"):
            await client.delete(f"/engines/{name}")
        with pytest.raises(EngineUnreachable):
            await router.ask()
        router.engines["http://new"] = Engine("new")
        await client.post("/engines", json={"name": "new", "url": "http://new"})
    assert (await router.ask())[1] == [100, 101, 102]


async def test_the_end_closes_every_engine(router: LiveRouter) -> None:
    router.engine("d").pause.clear()
    asking = asyncio.ensure_future(router.ask())
    while not router.engine("d").calls:
        await asyncio.sleep(0)
    router.membership.remove("d")
    await router.membership.__aexit__()
    assert [engine.closed for engine in router.engines.values()] == [True, True]
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert await router.has_everything_back()


# ---- who may call --------------------------------------------------------------------------------------------

ROUTES = [
    ("GET", "/program"),
    ("PUT", "/program"),
    ("GET", "/engines"),
    ("POST", "/engines"),
    ("DELETE", "/engines/d"),
    ("POST", "/engines/d/drain"),
    ("DELETE", "/engines/d/drain"),
    ("PUT", "/engines/d/role"),
]


@pytest.mark.slow
@pytest.mark.parametrize("header", [None, "Bearer wrong", "secret", "Basic secret", "Bearer ", "Bearer secret2"])
@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_without_the_key_nothing_is_told_or_changed(
    router: LiveRouter, method: str, path: str, header: str | None
) -> None:
    async with router.client("secret", "other") as client:
        headers = {} if header is None else {"authorization": header}
        answer = await client.request(method, path, json={"program": "balanced"}, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "unauthorized"
    assert [(member.name, member.draining) for member in router.fleet.members] == [("p", False), ("d", False)]
    assert router.service.routing.current.number == 1


@pytest.mark.parametrize("key", ["secret", "other"])
async def test_with_a_key_all_is_open(router: LiveRouter, key: str) -> None:
    async with router.client("secret", "other") as client:
        client.headers["authorization"] = f"Bearer {key}"
        assert (await client.put("/program", json={"program": "balanced"})).status_code == 200
        assert (await client.delete("/engines/d")).status_code == 200


# ---- scheduling ----------------------------------------------------------------------------------------------

FILE = """
plugins: [{type: queue-scorer}, {type: decode-filter}]
schedulingProfiles: [{name: mine, plugins: [{pluginRef: decode-filter}, {pluginRef: queue-scorer, weight: 2}]}]
"""


async def test_a_scheduling_file_is_shown_and_changed(router: LiveRouter, tmp_path: Path) -> None:
    (tmp_path / "scheduling.yaml").write_text(FILE)
    async with router.client() as client:
        assert (await client.get("/scheduling")).json()["file"] is None
        answer = await client.put("/scheduling", json={"file": str(tmp_path / "scheduling.yaml")})
        assert answer.status_code == 200, answer.text
        assert answer.json() == (await client.get("/scheduling")).json()
    assert answer.json()["profiles"] == {
        "mine": {"filters": ["DecodeFilter"], "scorers": {"QueueScorer": 2.0}, "picker": "MaxScorePicker"}
    }
    with FleetView(router.fleet).pick(by="mine") as engine:
        assert engine.name == "d"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("plugins: [{type: nonsense}]\nschedulingProfiles: [{name: a}]", "plugins[0].type"),
        ("plugins: []\nschedulingProfiles: [{name: a}]\nsurprise: 1", "surprise"),
        (None, "scheduling"),
    ],
)
async def test_a_scheduling_file_that_does_not_load_changes_nothing(
    router: LiveRouter, tmp_path: Path, text: str | None, field: str
) -> None:
    if text is not None:
        (tmp_path / "scheduling.yaml").write_text(text)
    before = router.fleet.scheduling
    async with router.client() as client:
        answer = await client.put("/scheduling", json={"file": str(tmp_path / "scheduling.yaml")})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
        if text is not None:
            sent = await client.put("/scheduling", json={"file": "mine.yaml", "content": text})
            assert (sent.status_code, sent.json()["error"]["param"]) == (400, field)
    assert router.fleet.scheduling is before


async def test_running_sequences_are_listed_with_their_engine(router: LiveRouter) -> None:
    router.engine("d").pause.clear()
    asking = asyncio.ensure_future(router.ask({"x-tercet-program": "data_parallel"}))
    while not router.engine("d").calls and not router.engine("p").calls:
        await asyncio.sleep(0)
    async with router.client() as client:
        (shown,) = (await client.get("/sequences")).json()
        engine = shown["engine"]
        assert shown.pop("seconds") >= 0
        assert shown == {
            "seq_id": "s1", "program": "data_parallel", "engine": engine, "state": "waiting", "attempt": 0, "moves": 0,
            "prompt_tokens": 100, "tokens": 0,
        }  # fmt: skip
        assert len((await client.get("/sequences", params={"engine": engine})).json()) == 1
        assert (await client.get("/sequences", params={"engine": "another"})).json() == []
        for name in "pd":
            router.engine(name).pause.set()
        await asking
        assert (await client.get("/sequences")).json() == []


TAKEN = {
    (route.path, method) for route in admin.routes.routes if isinstance(route, Route) for method in route.methods or ()
}


@pytest.mark.parametrize("path", sorted({path for path, _ in TAKEN}))
async def test_a_method_that_a_route_does_not_take_is_405_with_those_that_it_takes(
    router: LiveRouter, path: str
) -> None:
    takes = {method for taken, method in TAKEN if taken == path}
    asked = path.removeprefix(API_PREFIX).replace("{name}", "d").replace("{seq_id:path}", "s")
    async with router.client() as client:
        for method in {"GET", "POST", "PUT", "PATCH", "DELETE"} - takes:
            answer = await client.request(method, asked)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["type"]) == (405, "method_not_allowed", "MethodNotAllowed")
            assert {each.strip() for each in answer.headers["allow"].split(",")} == takes
            assert method in error["message"]
        assert (await client.get(f"{asked}/nothing/of/it")).status_code in (404, 405)


async def test_an_error_of_a_route_says_when_to_retry() -> None:
    routes, app = APIRouter(route_class=TercetRoute), FastAPI()

    @routes.get("/full")
    async def full() -> None:
        raise Saturated("the fleet is full", retry_after=7)

    app.router.routes.extend(routes.routes)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answer = await client.get("/full")
    assert (answer.status_code, answer.headers.get("retry-after")) == (429, "7")
    assert answer.json()["error"]["message"] == "the fleet is full"
