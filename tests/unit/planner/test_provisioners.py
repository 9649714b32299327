"""Who carries out plans: nothing is planned while a change is under way, and nothing grows after one that failed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from tercet.cluster.scaling.decide import ScaleCall
from tercet.cluster.scaling.kubernetes import KubernetesFleet
from tercet.decisions.planning import FleetPlan
from tercet.protocol import BadRequest, EngineError
from tercet_lab.planner_settings import PlannerSettings
from tercet_planner.live_planner import (
    KubernetesProvisioner,
    LivePlanner,
    PlannerMetrics,
    ProvisioningState,
    RoleProvisioner,
    fleet_of_router,
)
from tercet_planner.planner import FleetChange
from tercet_planner.planner_settings import PlannerConfig

from .test_live_planner import Router

LARGEST = """
from tercet.decisions.planning import FleetPlan, Observed, WantedPlan

def wanted(seen: Observed) -> WantedPlan:
    return WantedPlan(FleetPlan(2, seen.limits.most - 2), "as many as there may be")
"""


class EngineProvisioner:
    resizes = True

    def __init__(self) -> None:
        self.now = ProvisioningState()
        self.wanted: list[str] = []

    async def state(self) -> ProvisioningState:
        return self.now

    async def change(self, plan: FleetPlan, change: FleetChange) -> None:
        self.wanted.append(str(plan))


async def test_a_change_is_waited_for_and_one_that_failed_is_not_repeated_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LARGEST)
    planning = PlannerSettings(interval_s=1.0, fewest=2, most=8)
    config = PlannerConfig(act="scale", planner=f"{tmp_path / 'mine.py'}:wanted", planning=planning)
    provisioner, router = EngineProvisioner(), Router(prompt=100)
    planner = LivePlanner(config, router.ask, provisioner, PlannerMetrics())
    await planner.look(0.0)
    assert provisioner.wanted == ["2P6D"]
    provisioner.now = ProvisioningState(1, under_way=True)
    await planner.look(10.0)
    provisioner.now = ProvisioningState(1, failure="decode-2: no process")
    for now in (20.0, 60.0, 139.0):
        await planner.look(now)
    assert provisioner.wanted == ["2P6D"]
    await planner.look(141.0)
    assert provisioner.wanted == ["2P6D", "2P6D"]


class Pods:
    def __init__(self) -> None:
        self.calls: list[ScaleCall] = []
        self.ready = asyncio.Event()

    async def scale(self, call: ScaleCall, *_: Any) -> None:
        self.calls.append(call)
        await self.ready.wait()
        if len(self.calls) > 1:
            raise EngineError("the quota is used up")


async def test_pods_are_under_way_until_they_are_ready_and_say_why_they_are_not() -> None:
    pods = Pods()
    provisioner = KubernetesProvisioner(cast("KubernetesFleet", pods))
    assert await provisioner.state() == ProvisioningState()
    await provisioner.change(FleetPlan(2, 3), FleetChange())
    assert (await provisioner.state()).under_way
    pods.ready.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await provisioner.state() == ProvisioningState(1)
    await provisioner.change(FleetPlan(2, 4), FleetChange())
    await asyncio.sleep(0)
    assert await provisioner.state() == ProvisioningState(2, failure="the quota is used up")
    assert [(each.prefill, each.decode) for each in pods.calls] == [(2, 3), (2, 4)]


async def test_roles_of_many_engines_change_at_once_and_the_first_error_is_raised_after_all() -> None:
    running, most, changed = 0, 0, list[str]()

    async def ask(method: str, path: str, body: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        if path == "/engines/e3/role":
            raise EngineError("e3 is gone")
        changed.append(path)

    flips = FleetChange(flips=tuple((f"e{each}", "prefill") for each in range(40)))
    with pytest.raises(EngineError, match="e3 is gone"):
        await RoleProvisioner(ask).change(FleetPlan(40, 2), flips)
    assert len(changed) == 39
    assert 2 <= most <= 16


async def test_what_cannot_be_carried_out_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="--act scale"):
        await RoleProvisioner(Router(prompt=1).ask).change(FleetPlan(2, 3), FleetChange(starts=("decode",)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(BadRequest, match="no fleet of `tercet up`"):
        fleet_of_router("http://127.0.0.1:1")
