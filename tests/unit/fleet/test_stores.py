"""A store is a member that is seen, followed and never picked, and that says nothing about what the fleet serves."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from tercet.decisions.migration.policies import least_loaded
from tercet.decisions.scheduling import Scheduling
from tercet.fleet import EngineFleet, FleetView, Member
from tercet.fleet.membership import Membership, ServedModel
from tercet.fleet.policy_views import loaded_engines, observed_engines
from tercet.protocol import BadRequest, Engine, EngineStatus, EngineUnreachable, MemberRole, Request, Role
from tercet.settings import EngineAddress
from tests.unit.decisions.scheduling.builders import loaded
from tests.unit.fakes import FakeEngine
from tests.unit.store.stores import MIRROR

SCHEDULING = """
plugins: [{type: queue-scorer}, {type: max-score-picker}]
schedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer}]}]
"""
ROLES: tuple[Role, ...] = ("prefill", "decode", "both")


def member(name: str, role: MemberRole) -> Member:
    return Member(name, "", role, FakeEngine(name))


def request(number: int = 0) -> Request:
    return Request(seq_id=f"s{number}", prompt=(1, 2, 3))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("by", ["round_robin", "least_loaded", "scheduled"])
def test_a_store_is_never_picked(role: Role, by: str, tmp_path: Path) -> None:
    fleet = EngineFleet([member("s", "store"), member("a", "prefill")], scheduling=loaded(tmp_path, SCHEDULING))
    for number in range(4):
        with FleetView(fleet).pick(role, by=by, request=request(number)) as engine:
            assert engine.name == "a"
    fleet.member("a").reachable = False
    with FleetView(fleet).pick(role, by=by, request=request(9)) as engine:
        assert engine.name == "a"  # which may be back
    fleet.drain("a")
    with (
        pytest.raises(EngineUnreachable, match="every engine of this fleet is drained"),
        FleetView(fleet).pick(role, by=by),
    ):
        pass
    fleet.remove("a")
    with pytest.raises(EngineUnreachable, match="this fleet has no engines"), FleetView(fleet).pick(role, by=by):
        pass


def test_routes_offers_and_moves_leave_stores_out() -> None:
    fleet = EngineFleet([member("s", "store"), member("a", "both")], scheduling=Scheduling())
    with FleetView(fleet).route(request()) as route:
        assert (route.decode.name, route.prefill) == ("a", None)
    assert [each.name for each in observed_engines(fleet)] == ["a"]
    engines = loaded_engines(fleet, {}, [], 1.0)
    assert [each.name for each in engines] == ["s", "a"]
    for role in ROLES:
        found = least_loaded(engines, role)
        assert found is not None
        assert found.name == "a"
        assert not fleet.member("s").can(role)
    fleet.remove("a")
    assert not any(FleetView(fleet).offers(role) for role in ROLES)
    fleet.member("s").role = "both"  # and a role that changes counts at once
    assert FleetView(fleet).offers("decode")


class Host(FakeEngine):
    """An engine, or a store, with this status."""

    def __init__(self, name: str, status: EngineStatus) -> None:
        super().__init__(name)
        self._status = replace(status, engine=name)

    async def status(self) -> EngineStatus:
        return self._status


async def test_a_store_in_an_engines_role_is_refused_and_an_engine_in_a_stores() -> None:
    hosts: dict[str, EngineStatus] = {"s": replace(MIRROR, is_store=True), "a": MIRROR}
    fleet = EngineFleet([])

    @asynccontextmanager
    async def connect(name: str, url: str, admit: object) -> AsyncGenerator[Engine]:
        yield Host(name, hosts[name])

    async with Membership(fleet, connect) as membership:
        membership.served_model = ServedModel.of([MIRROR])
        wrong: tuple[tuple[str, MemberRole, str], ...] = (
            ("s", "both", "s is a store, so its role must be store"),
            ("a", "store", "a is an engine, so its role cannot be store"),
        )
        for name, role, why in wrong:
            address = EngineAddress(name, f"http://{name}:1", role)
            with pytest.raises(BadRequest, match=why):
                await membership.check(address)
            entered = await membership.enter(address)
            await membership.ask([entered])
            assert (entered.reachable, entered.refused) == (False, why)
            fleet.remove(name)
        addresses = [EngineAddress("s", "http://s:1", "store"), EngineAddress("a", "http://a:1")]
        right = [await membership.enter(address) for address in addresses]
        await membership.ask(right)
        assert [each.reachable for each in right] == [True, True]


async def test_a_store_alone_is_no_engine_that_answers() -> None:
    @asynccontextmanager
    async def connect(name: str, url: str, admit: object) -> AsyncGenerator[Engine]:
        yield Host(name, replace(MIRROR, is_store=True))

    async with Membership(EngineFleet([]), connect) as membership:
        await membership.enter(EngineAddress("s", "http://s:1", "store"))
        with pytest.raises(EngineUnreachable, match="no engine of this fleet answered"):
            await membership.until_ready(0.05)
