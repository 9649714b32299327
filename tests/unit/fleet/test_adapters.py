"""LoRA adapters of a fleet: what a name means, who is picked for it, and loading on all engines or on none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tercet.decisions.scheduling import Scheduling
from tercet.fleet import EngineFleet, FleetView, Member
from tercet.fleet.adapters import agreed, differing
from tercet.fleet.fleet_view import Trace
from tercet.fleet.membership import Membership
from tercet.protocol import (
    AdapterLoad,
    AdapterReport,
    BadRequest,
    Conflict,
    EngineLoad,
    EngineStatus,
    EngineUnreachable,
    Request,
    Unauthorized,
    UnknownAdapter,
)
from tercet.router.state.fleet_adapters import AdapterLoader, load_everywhere, unload_everywhere
from tests.longest_wait import until


def report(name: str, digest: str = "1", path: str = "/p") -> AdapterReport:
    return AdapterReport(name, path, digest)


def status_of(*adapters: AdapterReport, most: int = 2) -> EngineStatus:
    return EngineStatus(
        engine="e", model="m", version="", vllm_version="", block_size=16, total_blocks=1, free_blocks=1, running=0,
        waiting=0, kv_cache_usage=0.0, max_model_len=1, leases=0, sends=0, max_adapters=most, adapters=adapters,
    )  # fmt: skip


class Host:
    """An engine that loads adapters; ``contents`` are at every path of its machine."""

    def __init__(self, contents: str = "1", refuses: Exception | None = None, most: int = 2) -> None:
        self.contents, self.refuses, self.most = contents, refuses, most
        self.adapters: dict[str, AdapterReport] = {}
        self.asked = 0

    async def load_adapter(self, name: str, path: str) -> AdapterReport:
        self.asked += 1
        if self.refuses is not None:
            raise self.refuses
        self.adapters[name] = AdapterReport(name, path, self.contents)
        return self.adapters[name]

    async def replace_adapter(self, name: str, path: str) -> AdapterReport:
        return await self.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        if self.adapters.pop(name, None) is None:
            raise UnknownAdapter(f"there is no {name}")

    async def status(self) -> EngineStatus:
        return status_of(*self.adapters.values(), most=self.most)


def fleet_of(**hosts: Any) -> EngineFleet:
    for name, host in hosts.items():
        host.name = name
    fleet = EngineFleet([Member(name, f"http://{name}", "both", host) for name, host in hosts.items()])
    for member in fleet.members:
        member.max_adapters = getattr(member.engine, "most", 2)
    return fleet


def membership_of(fleet: EngineFleet) -> Membership:
    return Membership(fleet, connect=lambda *_: pytest.fail("nobody joins"))  # type: ignore[arg-type,return-value]


def request(adapter: str | None) -> Request:
    return Request(seq_id="s", prompt=(1, 2, 3), adapter=adapter)


# ---- what a name means ---------------------------------------------------------------------------------------


def test_a_name_means_what_most_engines_mean() -> None:
    one, other = report("a", "1"), report("a", "2")
    for said in ([{"a": other}, {"a": one}, {"a": one}], [{"a": one}, {"a": other}, {"a": one}]):
        assert agreed(said)["a"] == one
    assert agreed([{"a": other}, {"a": one}])["a"] == one
    assert agreed([{"a": one}, {"a": other}])["a"] == one
    assert agreed([{"a": one}, {"a": one}], [other])["a"] == other
    assert agreed([{"a": one}], [report("a", "")])["a"] == one
    assert agreed([], [report("a", "")]) == {}
    assert list(differing({"x": {"a": one}, "y": {"a": other}}, {"a": one})) == [("y", other)]


# ---- who is picked -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["round_robin", "least_loaded", "scheduled"])
def test_who_lacks_the_adapter_is_not_picked(by: str) -> None:
    fleet = fleet_of(x=Host(), y=Host(), z=Host())
    fleet.scheduling = Scheduling()
    fleet.adapters.reported(fleet.member("y"), status_of(report("a")))
    fleet.adapters.reported(fleet.member("z"), status_of(report("a")))
    fleet.adapters.reported(fleet.member("x"), status_of(report("a", "2"), report("b")))
    if by == "scheduled":
        found = {fleet.picking.candidates("both", request=request("a"))[at].name for at in range(2)}
        assert found == {"y", "z"}
        return
    for adapter, expected in (("a", {"y", "z"}), ("b", {"x"}), (None, {"x", "y", "z"})):
        picked = set[str]()
        for _ in range(6):
            with FleetView(fleet).pick(
                by="round_robin" if by == "round_robin" else by, request=request(adapter)
            ) as engine:
                picked.add(engine.name)
        assert picked <= expected if by == "least_loaded" else picked == expected
    with pytest.raises(UnknownAdapter, match="'c'"), FleetView(fleet).pick(by=by, request=request("c")):
        pass


def test_an_engine_without_it_takes_nobodys_place() -> None:
    """Roles give way when nobody of one answers; weights do not."""
    fleet = fleet_of(x=Host(), y=Host())
    fleet.adapters.reported(fleet.member("x"), status_of(report("a")))
    fleet.member("x").reachable = False
    with FleetView(fleet).pick(request=request("a")) as engine:
        assert engine.name == "x"
    view = FleetView(fleet, Trace(), request=request("a"))
    assert not view.offers("both")
    assert FleetView(fleet).offers("both")
    with pytest.raises(UnknownAdapter, match="destination"):
        fleet.adapters.require("y", request("a"))
    fleet.adapters.require("y", request(None))


def test_a_request_stays_with_the_contents_that_it_began_with() -> None:
    """The adapter is replaced under its name, engine by engine, while the request runs."""
    fleet = fleet_of(x=Host(), y=Host())
    for name in "xy":
        fleet.adapters.reported(fleet.member(name), status_of(report("a", "1")))
    began = fleet.adapters.pinned(request("a"))
    assert (began.adapter, began.adapter_digest) == ("a", "1")
    assert fleet.adapters.pinned(began) is began
    view = FleetView(fleet, Trace(), request=began)
    fleet.adapters.reported(fleet.member("x"), status_of(report("a", "2")))
    for _ in range(4):
        with FleetView(fleet).pick(request=began) as engine:
            assert engine.name == "y"
    fleet.adapters.require("y", began)
    with pytest.raises(UnknownAdapter, match="destination"):
        fleet.adapters.require("x", began)
    fleet.adapters.reported(fleet.member("y"), status_of(report("a", "2")))
    assert not view.offers("both")
    with pytest.raises(UnknownAdapter, match="that it had when the request came"), FleetView(fleet).pick(request=began):
        pass
    assert fleet.adapters.pinned(request("a")).adapter_digest == "2"
    with pytest.raises(UnknownAdapter, match="this fleet has no adapter 'b'"):
        fleet.adapters.pinned(request("b"))
    assert fleet.adapters.pinned(request(None)) == request(None)


async def test_an_engine_whose_adapters_change_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.fleet.membership.POLL_INTERVAL_S", 0.01)
    host = Host()
    fleet = fleet_of(x=host)
    watching = asyncio.create_task(membership_of(fleet).watch())
    try:
        host.adapters["a"] = report("a")
        fleet.report("x", EngineLoad(waiting=0, running=0, kv_usage=0.0, adapters=AdapterLoad((), (), 2, stamp=5)))
        await until(lambda: "a" in fleet.adapters)
    finally:
        watching.cancel()


# ---- all engines, or none ------------------------------------------------------------------------------------


async def test_an_adapter_is_loaded_on_all_engines_that_take_any() -> None:
    hosts = {"x": Host(), "y": Host(), "without": Host(most=0)}
    fleet = fleet_of(**hosts)
    found = await load_everywhere(fleet, membership_of(fleet), "a", "/a")
    assert found == AdapterReport("a", "/a", "1")
    assert fleet.adapters == {"a": found}
    fleet.member("y").adapters = {}  # its files have changed: it says nothing of the adapter, and has it
    assert [name for name, host in hosts.items() if "a" in host.adapters] == ["x", "y"]
    assert await unload_everywhere(fleet, membership_of(fleet), "a") == []
    assert fleet.adapters == {}
    assert not any(host.adapters for host in hosts.values())


async def test_where_one_refuses_none_keeps_it() -> None:
    hosts = {"x": Host(), "y": Host(refuses=Unauthorized("not here")), "z": Host()}
    hosts["z"].adapters["a"] = AdapterReport("a", "/a", "1")
    fleet = fleet_of(**hosts)
    fleet.adapters.reported(fleet.member("z"), await hosts["z"].status())
    with pytest.raises(Unauthorized, match="not here"):
        await load_everywhere(fleet, membership_of(fleet), "a", "/a")
    assert [name for name, host in hosts.items() if "a" in host.adapters] == ["z"], "who had it keeps it"


async def test_other_contents_on_one_engine_are_no_adapter_of_a_fleet() -> None:
    hosts = {"x": Host("1"), "y": Host("2")}
    fleet = fleet_of(**hosts)
    with pytest.raises(Conflict, match="not the same on all engines"):
        await load_everywhere(fleet, membership_of(fleet), "a", "/a")
    assert not any(host.adapters for host in hosts.values())
    with pytest.raises(EngineUnreachable, match="--enable-lora"):
        await load_everywhere(fleet_of(x=Host(most=0)), membership_of(fleet), "a", "/a")


async def test_who_comes_back_without_it_loads_it() -> None:
    host, refusing = Host(), Host(refuses=BadRequest("no space"))
    fleet = fleet_of(x=host, y=refusing)
    fleet.adapters.declared = [report("a", path="/a")]
    loader = AdapterLoader(fleet, membership_of(fleet))
    for _ in range(2):
        await loader._complete(fleet.member("x"))
        await loader._complete(fleet.member("y"))
    assert list(fleet.member("x").adapters) == ["a"]
    assert (host.asked, refusing.asked) == (1, 1), "who refuses is asked again later"


async def test_an_engine_that_leaves_while_it_loads_does_not_keep_others_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("tercet.router.state.fleet_adapters.POLL_INTERVAL_S", 0.01)
    leaving, host = Host(refuses=RuntimeError("Session is closed")), Host()
    fleet = fleet_of(x=leaving, y=host)
    fleet.adapters.declared = [report("a", path="/a")]
    loader = AdapterLoader(fleet, membership_of(fleet))
    running = asyncio.create_task(loader.run())
    try:
        await until(lambda: "a" in fleet.member("y").adapters)
        assert len(loader._refused) == 1
        fleet.remove("x")
        await until(lambda: not loader._refused)
        assert not running.done()
    finally:
        running.cancel()
