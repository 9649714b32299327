"""Routers on several machines share a state in a ConfigMap, and one of them at a time has the Lease."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tercet.decisions.roles import RoleFlip
from tercet.fleet import EngineFleet
from tercet.fleet.kubernetes_api import ApiAccess
from tercet.fleet.membership import Membership
from tercet.protocol import BadRequest, Conflict, EngineError
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.plans import Plan
from tercet.router.serve.service import Service
from tercet.router.state.fleet_state import StateFile
from tercet.router.state.roles import RoleKeeper
from tercet.router.state.shared_state import SharedState
from tercet.router.state.state_store import (
    LEASE_SECONDS,
    RENEW_SECONDS,
    ConfigMapStore,
    LeaseTurn,
    asking,
    configmap_store,
)
from tercet.settings.fleet_settings import Objectives
from tests.clock import Clock
from tests.longest_wait import until

from .api_objects import NAMESPACE, ApiObjects, served_objects
from .conftest import LiveRouter, draining
from .test_fleet_state import FIRST

NOWHERE = Path("/nowhere")
CONFIGMAP = f"/api/v1/namespaces/{NAMESPACE}/configmaps/fleet"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/fleet-roles"


def state_in(api: ApiObjects, clock: Clock | None = None) -> StateFile:
    return StateFile(NOWHERE, ConfigMapStore(api.ask, NAMESPACE, "fleet", clock or Clock()))


def turn_in(api: ApiObjects, holder: str, clock: Clock) -> LeaseTurn:
    return LeaseTurn(api.ask, NAMESPACE, "fleet-roles", holder, clock)


# ---- the state -----------------------------------------------------------------------------------------------


def test_a_state_is_made_changed_and_read_by_another_router() -> None:
    api = ApiObjects()
    one, other = state_in(api), state_in(api)
    assert other.read() is None
    assert one.update(lambda state: state, FIRST) == FIRST
    changed = other.update(lambda state: state.with_draining(FIRST.members[0].address.name, True), FIRST)
    assert (changed.version, one.read()) == (2, changed)
    assert {method for method, _ in api.calls} == {"GET", "POST", "PATCH"}


def test_what_others_keep_in_the_object_stays() -> None:
    api = ApiObjects()
    file = state_in(api)
    file.update(lambda state: state, FIRST)
    api.objects[CONFIGMAP]["metadata"]["labels"] = {"team": "a"}
    api.objects[CONFIGMAP]["data"]["notes"] = "ours"
    file.update(lambda state: state.with_program(Plan(program="data_parallel")), FIRST)
    assert api.objects[CONFIGMAP]["metadata"]["labels"] == {"team": "a"}
    assert api.objects[CONFIGMAP]["data"]["notes"] == "ours"


def test_an_empty_configmap_is_filled() -> None:
    api = ApiObjects()
    api.ask("POST", CONFIGMAP.rpartition("/")[0], {"kind": "ConfigMap", "metadata": {"name": "fleet"}})
    assert state_in(api).update(lambda state: state, FIRST) == FIRST


def test_no_change_of_several_routers_is_lost() -> None:
    api, times = ApiObjects(), 25
    state_in(api).update(lambda state: state, FIRST)

    def work() -> None:
        file = state_in(api)
        for _ in range(times):
            file.update(lambda state: state.with_program(Plan(program="p")), FIRST)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    found = state_in(api).read()
    assert found is not None
    assert (found.version, found.program.number) == (1 + 3 * times, 1 + 3 * times)


def test_others_changes_are_looked_for_once_a_second_and_own_ones_at_once() -> None:
    api, clock = ApiObjects(), Clock()
    one, other = state_in(api, clock), state_in(api, clock)
    one.update(lambda state: state, FIRST)
    before, calls = one.store.stamp(), len(api.calls)
    for _ in range(9):
        clock.now += 0.1
        assert one.store.stamp() == before
    assert len(api.calls) == calls
    other.update(lambda state: state.with_program(Plan(program="p")), FIRST)
    clock.now += 1.0
    assert one.store.stamp() != before
    after = one.store.stamp()
    one.update(lambda state: state.with_program(Plan(program="q")), FIRST)
    assert one.store.stamp() != after


def test_what_the_server_refuses_names_the_right_that_is_missing() -> None:
    api = ApiObjects(refuse=403)
    with pytest.raises(
        EngineError, match=r"the ConfigMap models/fleet cannot be used: HTTP 403; its Role must allow get"
    ):
        state_in(api).read()


def test_a_state_that_kubernetes_would_refuse_is_refused_with_the_remedy() -> None:
    plan = Plan(program="file.py:function", source="#" * 1_000_000)
    with pytest.raises(BadRequest, match="remove engines"):
        state_in(ApiObjects()).update(lambda state: state.with_program(plan), FIRST)


def test_over_http_with_a_token() -> None:
    api = ApiObjects()
    with served_objects(api) as access:
        store = configmap_store(access, "fleet")
        assert StateFile(NOWHERE, store).update(lambda state: state, FIRST) == FIRST
        assert store.turn("roles").take()
        assert configmap_store(access, "elsewhere/fleet").name == "the ConfigMap elsewhere/fleet"
        assert api.tokens == {"Bearer token"}
    assert api.objects.keys() == {CONFIGMAP, LEASE}
    with pytest.raises(EngineError, match="does not answer"):
        store.load()


@asynccontextmanager
async def router_elsewhere(
    router: LiveRouter, metrics: Metrics, api: ApiObjects, path: Path, program: str = "disaggregated"
) -> AsyncGenerator[SharedState]:
    """A router with the engines of another one, on a machine of its own, that shares its state through the server."""
    fleet = EngineFleet(())
    membership = Membership(fleet, router._connect)
    service = Service(fleet, program, {}, metrics, return_after=3)
    shared = SharedState(path, membership, service, store=ConfigMapStore(api.ask, NAMESPACE, "fleet"))
    async with membership:
        await shared.start(router.shared.state)
        membership.served_model = await shared.until_ready()
        await shared.serving()
        following = asyncio.ensure_future(shared.follow())
        try:
            yield shared
        finally:
            following.cancel()
            await asyncio.wait({following})
            shared.close()


@pytest.mark.slow
async def test_two_routers_without_a_common_file_system(router: LiveRouter, metrics: Metrics, tmp_path: Path) -> None:
    api = ApiObjects()
    async with (
        router_elsewhere(router, metrics, api, tmp_path / "a" / "state.json") as one,
        router_elsewhere(router, metrics, api, tmp_path / "b" / "state.json") as two,
    ):
        assert await one.change(draining("d", True)) == []
        await until(lambda: two.service.fleet.member("d").draining)
        assert await two.change(lambda state: state.with_role("d", "both")) == []
        await until(lambda: one.service.fleet.member("d").role == "both")
    async with router_elsewhere(router, metrics, api, tmp_path / "c" / "state.json") as later:
        assert later.service.fleet.member("d").draining, "also for one that was started again"
    assert not list(tmp_path.rglob("state.json")), "no file has it"


@pytest.mark.slow
async def test_one_router_of_two_decides_about_roles(
    router: LiveRouter, metrics: Metrics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tercet.router.state.roles.INTERVAL_S", 0.01)
    api = ApiObjects()
    async with (
        router_elsewhere(router, metrics, api, tmp_path / "a" / "state.json") as one,
        router_elsewhere(router, metrics, api, tmp_path / "b" / "state.json") as two,
    ):
        paths = [tmp_path / which / "state.json" for which in "ab"]
        keepers = [
            RoleKeeper(each, path, Objectives(ttft=1.0, tpot=0.1)) for each, path in zip((one, two), paths, strict=True)
        ]
        first = asyncio.ensure_future(keepers[0].run())
        await until(lambda: one.state.role_keeper == keepers[0]._name)
        second = asyncio.ensure_future(keepers[1].run())
        try:
            await until(lambda: two.state.role_keeper == keepers[0]._name)
            assert not await keepers[1]._files.run(keepers[1]._mine.take)
            first.cancel()
            await until(lambda: two.state.role_keeper == keepers[1]._name)
            with pytest.raises(Conflict, match="decides about roles now"):
                await keepers[0]._flip(RoleFlip(("d",), "prefill", "it comes late"))
        finally:
            second.cancel()
            await asyncio.wait([first, second])


# ---- whose turn it is ----------------------------------------------------------------------------------------


def test_the_next_one_waits_for_the_end_of_a_lease_whose_holder_was_killed() -> None:
    api, clock = ApiObjects(), Clock()
    killed, other = turn_in(api, "killed", clock), turn_in(api, "other", clock)
    assert killed.take()
    assert not other.take()
    clock.now += LEASE_SECONDS - 0.1
    assert not other.take()
    clock.now += 0.2
    assert other.take()
    assert api.objects[LEASE]["spec"]["leaseTransitions"] == 1
    assert not killed.take(), "it comes back and finds another holder"


def test_one_that_is_given_back_is_taken_at_once() -> None:
    api, clock = ApiObjects(), Clock()
    one, other = turn_in(api, "one", clock), turn_in(api, "other", clock)
    assert one.take()
    one.release()
    assert other.take()
    one.release()
    assert api.objects[LEASE]["spec"]["holderIdentity"] == "other"


def test_a_holder_renews_and_asks_no_more_often_than_it_must() -> None:
    api, clock = ApiObjects(), Clock()
    one, other = turn_in(api, "one", clock), turn_in(api, "other", clock)
    for _ in range(100):
        assert one.take()
        assert not other.take()
        clock.now += 0.5
    writes = sum(method != "GET" for method, _ in api.calls)
    assert writes <= 50 / RENEW_SECONDS + 1


def test_a_server_that_is_away_takes_nothing_away_until_the_lease_ends() -> None:
    api, clock = ApiObjects(), Clock()
    one = turn_in(api, "one", clock)
    assert one.take()
    api.away = True
    clock.now += RENEW_SECONDS + 1
    assert one.take()
    clock.now += LEASE_SECONDS
    with pytest.raises(EngineError):
        one.take()
    api.away = False
    assert one.take()


def test_who_decided_before_is_refused_after_another_has_begun() -> None:
    """Its change was on its way when the lease ended: it meets the name of the next one in the state."""
    api = ApiObjects()
    file = state_in(api)
    file.update(lambda state: state.with_role_keeper("old"), FIRST)
    file.update(lambda state: state.with_role_keeper("new"), FIRST)
    with pytest.raises(Conflict, match="new decides about roles now, not old"):
        file.update(lambda state: state.require_role_keeper("old").with_flip(("d",), "prefill"), FIRST)
    assert file.update(lambda state: state.require_role_keeper("new"), FIRST).version == 3


class Objects(Protocol):
    """What keeps objects: an API server, or Ray's head."""

    def ask(self, method: str, path: str, body: dict[str, object] | None) -> tuple[int, dict[str, object]]: ...


class Machine:
    """A process with its own way to the server, and its own clock, which began at another time."""

    def __init__(self, name: str, api: Objects, clock: Clock, offset: float) -> None:
        self.away = False
        self.is_running = True
        self._api, self._clock, self._offset = api, clock, offset
        self.turn = LeaseTurn(self.ask, NAMESPACE, "fleet-roles", name, self.time)

    def time(self) -> float:
        return self._clock() + self._offset

    def ask(self, method: str, path: str, body: dict[str, object] | None) -> tuple[int, dict[str, object]]:
        answer = self._api.ask(method, path, body) if not self.away else None
        self._clock.now += 0.7  # calls take time, in which others do something, too
        if answer is None:
            raise EngineError("no way to the server")
        return answer

    @property
    def has_it(self) -> bool:
        return self.is_running and self.turn.holds(self.time())


class TurnsOfMachines(RuleBasedStateMachine):
    """Whatever is killed, cut off and comes back: never two have the turn, and in the end one has it."""

    def __init__(self) -> None:
        super().__init__()
        self.api, self.clock = self.objects(), Clock()
        self.machines = [Machine(f"m{each}", self.api, self.clock, 1000.0 * each) for each in range(3)]
        self.started = len(self.machines)

    def objects(self) -> Objects:
        return ApiObjects()

    def look(self, which: int) -> None:
        machine = self.machines[which]
        try:
            took = machine.turn.take()
        except EngineError:
            took = False
        assert took == machine.turn.holds(machine.time())

    @rule(which=st.integers(0, 2))
    def takes(self, which: int) -> None:
        self.look(which)

    @rule(seconds=st.floats(0.1, LEASE_SECONDS * 1.5))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(which=st.integers(0, 2))
    def is_cut_off_or_comes_back(self, which: int) -> None:
        self.machines[which].away ^= True

    @rule(which=st.integers(0, 2))
    def is_killed_and_replaced(self, which: int) -> None:
        self.machines[which].is_running = False
        self.machines[which] = Machine(f"m{self.started}", self.api, self.clock, 1000.0 * self.started)
        self.started += 1

    @rule(which=st.integers(0, 2))
    def gives_it_back(self, which: int) -> None:
        if not self.machines[which].away:
            self.machines[which].turn.release()
            assert not self.machines[which].has_it

    @invariant()
    def never_two(self) -> None:
        assert sum(each.has_it for each in self.machines) <= 1

    @precondition(lambda self: not all(each.away for each in self.machines))
    @rule()
    def in_the_end_one_has_it(self) -> None:
        for _ in range(40):
            for which in range(len(self.machines)):
                self.look(which)
                self.never_two()
            self.clock.now += 1.0
        assert sum(each.has_it for each in self.machines if not each.away) == 1


TestTurnsOfMachines = pytest.mark.slow(TurnsOfMachines.TestCase)


@pytest.mark.parametrize(("url", "token"), [("http://127.0.0.1:1", "a\nb"), ("https://127.0.0.1:99999", "t")])
def test_access_that_no_call_can_have_is_refused(url: str, token: str) -> None:
    with pytest.raises(BadRequest, match="cannot be called"):
        asking(ApiAccess(url, "llm", lambda: token))("GET", "/", None)
