"""Roles that follow the load: one process decides, the change is an operator's, and all processes can say why."""

from __future__ import annotations

import asyncio
import fcntl
import threading
from typing import Any

import pytest

from tercet.aio.files import FileThread
from tercet.decisions.objectives import Attainments
from tercet.decisions.planning import Observed
from tercet.decisions.roles import Pressures, RoleEffects, RoleFlip
from tercet.fleet.members import MemberState
from tercet.fleet.policy_views import PrefillLine, observed_engines
from tercet.protocol import EngineLoad
from tercet.router.serve.plans import Plan
from tercet.router.state.fleet_state import FleetState, ProgramInUse
from tercet.router.state.roles import FleetRoles, RoleKeeper, seen_for_roles, with_roles_followed
from tercet.settings import EngineAddress, RescheduleSettings
from tercet.settings.fleet_settings import ObjectiveClass, Objectives
from tests.longest_wait import until

from .conftest import LiveRouter, counted

OBJECTIVES = Objectives(ttft=1.0, tpot=0.025)
FLIP = RoleFlip(("d",), "prefill", "prefill is pressed")


class Decides:
    """A controller with prepared answers; without more it finds no pressure."""

    def __init__(self, *flips: RoleFlip) -> None:
        self.flips = list(flips)

    def on_tick(self, observed: Observed) -> RoleEffects:
        flip = self.flips.pop(0) if self.flips else None
        why = flip.reason if flip is not None else "no role is pressed"
        return RoleEffects(observed.now, why, Pressures(1.5, 0.5), {"prefill": 1, "decode": 1}, flip=flip)


def keeper_of(router: LiveRouter) -> RoleKeeper:
    return RoleKeeper(router.shared, router.directory / "state.json", OBJECTIVES)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.router.state.roles.INTERVAL_S", 0.01)


@pytest.mark.usefixtures("quick")
async def test_a_flip_is_an_operators_change(router: LiveRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.router.state.roles.RoleController", lambda objectives, **_: Decides(FLIP))
    router.shared.role_keeper = keeper_of(router)
    version = router.shared.state.version
    task = asyncio.ensure_future(router.shared.role_keeper.run())
    try:
        await until(lambda: router.fleet.member("d").role == "prefill")
        await until(lambda: counted("tercet_role_flips_total", role="prefill") == 1)
        assert router.shared.state.version == version + 2, "who decides, and the change"
        assert router.shared.state.changes[-1].event == "engine_role"
        assert router.shared.state.changes[-1].reason == "roles: auto: prefill is pressed"
        assert counted("tercet_role_pressure", role="prefill") == 1.5
        async with router.client() as client:
            found = (await client.get("/roles")).json()
        assert found["roles"] == "auto"
        assert found["engines"] == {"p": "prefill", "d": "prefill"}
        assert [flip["engines"] for flip in found["decision"]["flips"]] == [["d"]]
        assert found["decision"]["why"]
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.usefixtures("quick")
async def test_one_process_decides_and_the_next_takes_over(router: LiveRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[Decides] = []

    def policy(objectives: Objectives, **_: object) -> Decides:
        began.append(Decides())
        return began[-1]

    monkeypatch.setattr("tercet.router.state.roles.RoleController", policy)
    keepers = [asyncio.ensure_future(keeper_of(router).run())]
    try:
        await until(lambda: len(began) == 1)
        keepers.append(asyncio.ensure_future(keeper_of(router).run()))  # later: otherwise either may get the lock
        await asyncio.sleep(0.1)
        assert len(began) == 1
        keepers[0].cancel()
        await until(lambda: len(began) == 2)
    finally:
        for task in keepers:
            task.cancel()
        await asyncio.wait(keepers)


@pytest.mark.usefixtures("quick")
async def test_a_lock_that_came_too_late_for_its_caller_is_given_back(
    router: LiveRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that hangs lets the lock be taken after the keeper was cancelled."""
    taking, goes_on = threading.Event(), threading.Event()
    flock = fcntl.flock

    def slow(held: int, how: int) -> None:
        taking.set()
        goes_on.wait(60)
        flock(held, how)

    monkeypatch.setattr("tercet.router.state.state_store.fcntl.flock", slow)
    first = asyncio.ensure_future(keeper_of(router).run())
    await until(taking.is_set)
    first.cancel()
    await asyncio.wait([first])
    goes_on.set()
    began: list[Decides] = []

    def policy(objectives: Objectives, **_: object) -> Decides:
        began.append(Decides())
        return began[-1]

    monkeypatch.setattr("tercet.router.state.roles.RoleController", policy)
    second = asyncio.ensure_future(keeper_of(router).run())
    try:
        await until(lambda: len(began) == 1)
    finally:
        second.cancel()
        await asyncio.wait([second])


async def test_a_decision_that_cannot_be_read_in_time_is_not_shown(
    router: LiveRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    router.shared.role_keeper = keeper = keeper_of(router)
    go_on = threading.Event()
    monkeypatch.setattr("tercet.router.state.roles.read_record", lambda *_: go_on.wait(60))
    keeper._files = FileThread(0.05, 0.05)
    async with router.client() as client:
        answer = await client.get("/roles")
    assert (answer.status_code, answer.json()["decision"]) == (200, None)
    go_on.set()


async def test_an_operators_later_change_stands(router: LiveRouter) -> None:
    keeper = keeper_of(router)
    await router.shared.change(lambda state: state.with_role("d", "both").with_role_keeper(keeper._name))
    version = router.shared.state.version
    assert not await keeper._flip(FLIP)
    assert router.shared.state.version == version
    assert router.fleet.member("d").role == "both"


def test_a_flip_is_one_change_of_several_engines() -> None:
    members = tuple(MemberState(EngineAddress(name, f"http://{name}", "decode")) for name in "abc")
    state = FleetState(members=members, program=ProgramInUse(1, Plan(program="disaggregated")))
    after = state.with_flip(("a", "c"), "prefill")
    assert [each.address.role for each in after.members] == ["prefill", "decode", "prefill"]
    assert after.with_flip(("a", "b"), "prefill") is after
    assert after.with_flip(("gone",), "prefill") is after


async def test_a_flip_that_was_not_made_is_not_remembered(router: LiveRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.router.state.roles.RoleController", lambda objectives, **_: Decides(FLIP))

    async def refuses(flip: RoleFlip) -> bool:
        return False

    roles = FleetRoles(router.fleet, OBJECTIVES, refuses, seen_for_roles(router.fleet, OBJECTIVES))
    await roles.look()
    assert not roles.flips
    assert roles.engines_changed == 0


async def test_the_policy_sees_what_engines_report(router: LiveRouter) -> None:
    seen: list[Any] = []

    class Looks(Decides):
        def on_tick(self, observed: Observed) -> RoleEffects:
            seen.extend(observed.engines)
            return super().on_tick(observed)

    async def never(flip: RoleFlip) -> bool:
        raise AssertionError

    roles = FleetRoles(router.fleet, OBJECTIVES, never, seen_for_roles(router.fleet, OBJECTIVES))
    roles._controller = Looks()  # type: ignore[assignment]
    router.fleet.report("d", EngineLoad(waiting=3, running=2, kv_usage=0.5, step_time=0.02))
    router.fleet.drain("p")
    await roles.look()
    prefill, decode = seen
    assert (prefill.name, prefill.able, prefill.waiting_s) == ("p", False, 0.0)
    assert (decode.running, decode.queued, decode.step_s, decode.kv_usage) == (2, 3, 0.02, 0.5)
    # Of a batch, this process and another one run four of the five there, in the background.
    router.fleet.member("d").background = 1
    lines = {"d": PrefillLine(0.5, 1.0, 4)}
    _, own = observed_engines(router.fleet)
    _, everywhere = observed_engines(router.fleet, lines)
    assert (own.running, own.queued, own.kv_usage) == (2, 2, 0.4)
    assert (everywhere.running, everywhere.queued, everywhere.kv_usage) == (0, 1, pytest.approx(0.1))


def test_decodes_leave_engines_that_prefill_from_now_on() -> None:
    assert with_roles_followed(RescheduleSettings()).policies == ("prefill_to_decode",)
    told = RescheduleSettings(policies=("prefill_to_decode", "decode_load"))
    assert with_roles_followed(told) is told


async def test_requests_count_by_whether_they_meet_the_objectives(router: LiveRouter, programs: str) -> None:
    router.service.attainments = Attainments(Objectives(ttft=60.0, classes=(ObjectiveClass("strict", ttft=1e-9),)))
    await router.ask()
    await router.ask({"x-objective-class": "unheard-of"})
    await router.ask({"x-objective-class": "strict"})
    await router.use(Plan(program=f"{programs}:refuses"))
    async with router.client() as client:
        found = (await client.get("/roles")).json()["objectives"]
        assert (await client.get("/status")).json()["objectives"] == found
    assert (found["requests"], found["met"], found["attainment"]) == (2, 2, 1.0)
    (strict,) = found["classes"]
    assert (strict["name"], strict["ttft"], strict["requests"], strict["met"]) == ("strict", 1e-9, 1, 0)
    assert counted("tercet_objective_requests_total", **{"class": "default"}, result="met") == 2
    assert counted("tercet_objective_requests_total", **{"class": "strict"}, result="missed") == 1
