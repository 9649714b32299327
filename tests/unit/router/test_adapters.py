"""LoRA adapters at the router: its routes, its state, and all processes that share it."""

from __future__ import annotations

import asyncio

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from tercet.fleet import Trace
from tercet.fleet.admission import Gate
from tercet.protocol import (
    AdapterReport,
    Conflict,
    EngineStatus,
    EngineUnreachable,
    Request,
    Unauthorized,
    UnknownAdapter,
)
from tercet.router import admin
from tercet.router.observe.metrics import Metrics
from tercet.router.router_app import RouterApp
from tercet.router.state.fleet_state import AdapterState
from tercet.settings import Limits

from .conftest import Engine, LiveRouter
from .test_shared_state import joined


class Host(Engine):
    """An engine that takes adapters; ``contents`` are at every path of its machine but those that ``others`` names.

    ``late`` is in how many seconds one at a path is there.
    """

    def __init__(self, name: str, contents: str = "1") -> None:
        super().__init__(name)
        self.contents = contents
        self.others: dict[str, str] = {}
        self.late: dict[str, float] = {}
        self.in_use = False
        self.refusal: Exception | None = None
        self.adapters: dict[str, AdapterReport] = {}

    async def status(self) -> EngineStatus:
        status = await super().status()
        return msgspec.structs.replace(status, max_adapters=2, adapters=tuple(self.adapters.values()))

    async def load_adapter(self, name: str, path: str) -> AdapterReport:
        if self.refusal is not None:
            raise self.refusal
        self.adapters[name] = AdapterReport(name, path, self.others.get(path, self.contents))
        return self.adapters[name]

    async def replace_adapter(self, name: str, path: str) -> AdapterReport:
        if self.in_use:
            raise Conflict(f"name: {name!r} is in use", "name")
        await asyncio.sleep(self.late.get(path, 0.0))
        return await self.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        if self.adapters.pop(name, None) is None:
            raise UnknownAdapter(name)


@pytest.fixture
async def hosts(router: LiveRouter) -> dict[str, Host]:
    """The router's engines, which take adapters; it knows that they do."""
    found = {name: Host(name) for name in "pd"}
    for member in router.fleet.members:
        member.engine = found[member.name]
    router.engines.update({f"http://{name}": host for name, host in found.items()})
    await router.membership.ask(router.fleet.members)
    return found


def client(router: LiveRouter, loads_adapters: bool = False) -> httpx.AsyncClient:
    app = FastAPI()
    admin.install(app, router.shared, ["m"], loads_adapters)
    gate = Gate(Limits(), router.fleet, router.metrics)
    served = RouterApp(app, None, gate, (), router.service.program_called, 1_000_000)
    return httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://localhost")


async def test_an_adapter_is_loaded_listed_and_unloaded(router: LiveRouter, hosts: dict[str, Host]) -> None:
    expected = {"name": "a", "path": "/a", "digest": "1", "engines": ["p", "d"]}
    async with client(router) as asked:
        loaded = await asked.post("/tercet/v1/adapters", json={"name": "a", "path": "/a"})
        assert (loaded.status_code, loaded.json()) == (201, expected)
        assert (await asked.get("/tercet/v1/adapters")).json() == [expected]
        assert router.shared.state.adapters == (AdapterState("a", "/a", "1"),)
        other = await asked.post("/tercet/v1/adapters", json={"name": "a", "path": "/b"})
        assert (other.status_code, other.json()["error"]["param"]) == (409, "name")
        base = await asked.post("/tercet/v1/adapters", json={"name": "m", "path": "/a"})
        assert base.status_code == 400
        gone = await asked.delete("/tercet/v1/adapters/a")
        assert gone.status_code == 200
        assert not any(host.adapters for host in hosts.values())
        assert (await asked.get("/tercet/v1/adapters")).json() == []
        again = await asked.delete("/tercet/v1/adapters/a")
        assert (again.status_code, again.json()["error"]["code"]) == (404, "unknown_adapter")


async def _replaced(host: Host, contents: str) -> None:
    await host.unload_adapter("a")
    host.contents = contents
    await host.load_adapter("a", f"/{contents}")


@pytest.mark.parametrize("elsewhere", ["1", "0"])
async def test_a_retry_goes_on_with_the_same_weights_or_not_at_all(
    router: LiveRouter, hosts: dict[str, Host], elsewhere: str
) -> None:  # fmt: skip
    """The engine that decodes dies after a token; the other one's adapter of that name is another one by then."""
    for host in hosts.values():
        await host.load_adapter("a", "/1")
    await router.membership.ask(router.fleet.members)
    request = Request(seq_id="s", prompt=tuple(range(100)), adapter="a", headers={"x-tercet-program": "data_parallel"})
    router.fleet.drain("p")
    hosts["d"].fail_after, hosts["d"].failures["stream"] = 1, EngineUnreachable("gone")
    seen: list[Request] = []
    hosts["p"].on_request = seen.append
    tokens = list[int]()

    async def served() -> None:
        async for output in router.service.run(request, Trace()):
            tokens.extend(output.token_ids)
            if len(tokens) == 1:
                router.fleet.drain("p", draining=False)
                await _replaced(hosts["p"], elsewhere)
                await router.membership.ask([router.fleet.member("p")])

    if elsewhere == "1":
        await served()
        assert tokens == [100, 101, 102]
        assert [each.adapter_digest for each in seen] == ["1"]
        return
    with pytest.raises((EngineUnreachable, UnknownAdapter)):
        await served()
    assert tokens == [100]
    assert not seen


async def test_what_an_engine_refuses_is_loaded_nowhere(router: LiveRouter, hosts: dict[str, Host]) -> None:
    hosts["d"].refusal = Unauthorized("not while it runs")
    with pytest.raises(Unauthorized):
        await router.shared.adapters.load("a", "/a")
    hosts["d"].refusal, hosts["d"].contents = None, "2"
    with pytest.raises(Conflict, match="not the same on all engines"):
        await router.shared.adapters.load("a", "/a")
    assert not any(host.adapters for host in hosts.values())
    assert router.shared.state.adapters == ()


async def test_vllms_own_routes_are_there_if_its_variable_says_so(router: LiveRouter, hosts: dict[str, Host]) -> None:
    body = {"lora_name": "a", "lora_path": "/a"}
    async with client(router) as asked:
        assert (await asked.post("/v1/load_lora_adapter", json=body)).status_code == 404
    async with client(router, loads_adapters=True) as asked:
        answer = await asked.post("/v1/load_lora_adapter", json=body)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'a' added successfully.")
        assert all("a" in host.adapters for host in hosts.values())
        answer = await asked.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'a' removed successfully.")
        assert not any(host.adapters for host in hosts.values())


@pytest.mark.parametrize("route", ["/tercet/v1/adapters/a", "/v1/load_lora_adapter"])
async def test_an_adapter_is_replaced_everywhere_or_nowhere(
    router: LiveRouter, hosts: dict[str, Host], route: str
) -> None:
    async with client(router, loads_adapters=True) as asked:

        async def replaced(path: str) -> httpx.Response:
            if route.startswith("/v1"):
                body = {"lora_name": "a", "lora_path": path, "load_inplace": True}
                return await asked.post(route, json=body)
            return await asked.put(route, json={"path": path})

        assert (await replaced("/1")).status_code == 200  # there is none yet
        for host in hosts.values():
            host.others["/2"] = "2"
        hosts["d"].in_use = True
        refused = await replaced("/2")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
        assert [host.adapters["a"].digest for host in hosts.values()] == ["1", "1"]
        assert router.shared.state.adapters == (AdapterState("a", "/1", "1"),)
        hosts["d"].in_use = False
        assert (await replaced("/2")).status_code == 200
        assert router.shared.state.adapters == (AdapterState("a", "/2", "2"),)
        assert router.fleet.adapters == {"a": AdapterReport("a", "/2", "2")}
        assert router.fleet.adapters.pinned(Request(seq_id="s", prompt=(1,), adapter="a")).adapter_digest == "2"


async def test_an_engine_that_cannot_go_back_is_left_without(router: LiveRouter, hosts: dict[str, Host]) -> None:
    """The files that it had are overwritten, and another engine still uses what they were."""
    await router.shared.adapters.load("a", "/a")
    hosts["p"].contents, hosts["d"].in_use = "2", True
    with pytest.raises(Conflict, match="in use"):
        await router.shared.adapters.replace("a", "/a")
    assert {name: bool(host.adapters) for name, host in hosts.items()} == {"p": False, "d": True}
    hosts["d"].contents, hosts["d"].in_use = "2", False
    await router.shared.adapters.replace("a", "/a")
    assert {host.adapters["a"].digest for host in hosts.values()} == {"2"}
    assert router.fleet.adapters["a"].digest == "2"


async def test_of_two_that_replace_it_at_once_the_second_one_holds_everywhere(
    router: LiveRouter, hosts: dict[str, Host]
) -> None:  # fmt: skip
    await router.shared.adapters.load("a", "/a")
    for host, late in zip(hosts.values(), (("/2", 0.05), ("/3", 0.05)), strict=True):
        host.others, host.late = {"/2": "2", "/3": "3"}, dict([late])
    await asyncio.gather(*(router.shared.adapters.replace("a", path) for path in ("/2", "/3")))
    assert [host.adapters["a"].digest for host in hosts.values()] == ["3", "3"]
    assert router.fleet.adapters["a"].digest == "3"


async def test_all_that_share_the_fleet_serve_it_before_it_is_answered(
    router: LiveRouter, metrics: Metrics, hosts: dict[str, Host]
) -> None:  # fmt: skip
    async with joined(router, metrics) as other:
        assert await router.shared.adapters.load("a", "/a") == []
        assert other.fleet.adapters == {"a": AdapterReport("a", "/a", "1")}
        assert router.fleet.adapters == other.fleet.adapters
        assert await router.shared.adapters.unload("a") == []
        assert other.fleet.adapters.declared == []
