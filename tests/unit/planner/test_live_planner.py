"""A planner of a router's fleet, by the router's answers, and who carries out its plans: what it advises and changes,
and what it says that it cannot do.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from tercet.cluster.scaling.decide import ScaleCall
from tercet.cluster.scaling.kubernetes import KubernetesFleet
from tercet.decisions.planning import Expected, FleetPlan, Observed, PlannerReport, WantedPlan
from tercet.protocol import BadRequest, EngineError, EngineUnreachable
from tercet_lab.advice import ProfileCapacity
from tercet_lab.planner_settings import PlannerSettings
from tercet_lab.sim import load_profile
from tercet_planner import live_planner
from tercet_planner.live_planner import (
    KubernetesProvisioner,
    LivePlanner,
    PlannerMetrics,
    ProvisioningState,
    RoleProvisioner,
    TrafficView,
    fleet_of_router,
    read_traffic,
)
from tercet_planner.planner import FleetChange, Planner
from tercet_planner.planner_settings import PlannerConfig

OBJECTIVES = {"ttft": 1.0, "tpot": 0.025, "share": 0.99, "requests": 0, "met": 0, "attainment": None}
PROFILE = "llama-3.1-8b-h100-tp1"
MY_POLICY = """
from tercet.decisions.planning import FleetPlan, Observed, WantedPlan

def wanted(seen: Observed) -> WantedPlan:
    long = sum(each.prompt_tokens for each in seen.arrivals) > 1000 * len(seen.arrivals)
    engines = seen.plan.engines
    plan = FleetPlan(engines - 1, 1) if long else FleetPlan(1, engines - 1)
    return WantedPlan(plan, "long prompts" if long else "short")
"""


def engine(name: str, role: str, **given: Any) -> dict[str, Any]:
    shown = {"able": True, "waiting_s": 0.0, "busy_s": 0.0, "running": 0, "queued": 0, "contexts": 0, "step_s": None}
    return {"name": name, "role": role, **shown, "kv_usage": 0.0, "draining": False, **given}


class Router:
    """Answers as a router does, and carries out changes of roles."""

    def __init__(self, prompt: int, **given: Any) -> None:
        self.engines = [engine(f"e{each}", "prefill" if each < 2 else "decode") for each in range(4)]
        self.given = given
        self.arrivals = [[each * 0.1, prompt, 20, True, [], 512, True] for each in range(300)]
        self.asked: list[tuple[str, str, Any]] = []
        self.reported: PlannerReport | None = None

    async def ask(self, method: str, path: str, body: Any) -> Any:
        self.asked.append((method, path, body))
        if path == "/planner":
            self.reported = body
            return {}
        if method == "PUT":
            name = path.split("/")[2]
            next(each for each in self.engines if each["name"] == name)["role"] = body["role"]
            return {}
        answer = {"pid": 1, "processes": 1, "now": 30.0, "since": 0.0, "objectives": OBJECTIVES, "args": {}}
        answer |= {"program": "disaggregated", "arrivals": self.arrivals, "engines": self.engines, **self.given}
        return msgspec.json.decode(msgspec.json.encode(answer))

    @property
    def changes(self) -> list[tuple[str, Mapping[str, str]]]:
        return [(path, body) for _, path, body in self.asked if path.endswith("/role")]


def planner_of(router: Router, **given: Any) -> LivePlanner:
    config = PlannerConfig(**given)
    return LivePlanner(
        config, router.ask, RoleProvisioner(router.ask) if config.act == "roles" else None, PlannerMetrics()
    )


@pytest.fixture
def policy(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(MY_POLICY)
    return f"{file}:wanted"


async def test_a_policy_of_ones_own_acts_on_roles(policy: str) -> None:
    router = Router(prompt=3000)
    await planner_of(router, planner=policy, act="roles").look(0.0)
    assert router.changes == [("/engines/e2/role", {"role": "prefill"})]
    shorter = Router(prompt=100)
    await planner_of(shorter, planner=policy, act="roles").look(0.0)
    assert shorter.changes == [("/engines/e0/role", {"role": "decode"})]


async def test_advice_changes_nothing_and_is_given_once(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    router = Router(prompt=3000)
    planner = planner_of(router, planner=policy, planning=PlannerSettings(interval_s=1.0))
    with caplog.at_level(logging.WARNING, "tercet.planner"):
        await planner.look(0.0)
        await planner.look(100.0)
    assert router.changes == []
    assert [each.getMessage() for each in caplog.records] == [
        "advice: tercet engines role e2 prefill: 2P2D -> 3P1D: long prompts"
    ]


async def test_the_router_is_told_what_was_planned_and_what_came_of_it(policy: str) -> None:
    router = Router(prompt=3000)
    planner = planner_of(router, planner=policy, planning=PlannerSettings(interval_s=1.0))
    await planner.look(0.0)
    router.given["objectives"] = {**OBJECTIVES, "requests": 10, "met": 8}
    await planner.look(100.0)
    assert router.reported is not None
    first, last = router.reported.plans
    assert router.reported.act == "advise"
    assert (first.fleet, first.wanted, first.reason) == ("2P2D", "3P1D", "long prompts")
    assert first.steps == ("tercet engines role e2 prefill",)
    assert first.came == 0.8
    assert last.came is None
    assert first.at <= last.at


async def test_it_plans_at_its_interval(policy: str) -> None:
    router = Router(prompt=3000)
    planner = planner_of(router, planner=policy, act="roles", planning=PlannerSettings(interval_s=20.0))
    await planner.look(0.0)
    router.engines[2]["role"] = "decode"
    await planner.look(10.0)
    assert len(router.changes) == 1
    await planner.look(21.0)
    assert len(router.changes) == 2


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"objectives": {**OBJECTIVES, "tpot": None}}, "--objective-tpot"),
        ({"program": None}, "a split"),
        ({"engines": [engine("a", "both"), engine("b", "both")]}, "tercet engines role"),
    ],
)
async def test_what_cannot_be_planned_is_said(policy: str, given: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        await planner_of(Router(prompt=100, **given), planner=policy).look(0.0)


async def test_a_policy_that_answers_otherwise_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def wanted(seen):\n    return 3\n")
    with pytest.raises(BadRequest, match="must return WantedPlan, and returned int"):
        await planner_of(Router(prompt=100), planner=f"{file}:wanted").look(0.0)
    for name, said in (("oracle", "in simulations"), ("nobody", "choose simulate"), (f"{file}:other", "no function")):
        with pytest.raises(BadRequest, match=said):
            await planner_of(Router(prompt=100), planner=name).look(0.0)


def test_what_is_no_router_is_said() -> None:
    with pytest.raises(EngineUnreachable, match="no router"):
        read_traffic({"pid": 1})


async def test_processes_that_have_not_answered_yet_are_taken_to_have_as_much() -> None:
    router, view = Router(prompt=100, processes=2), TrafficView()
    view.heard(read_traffic(await router.ask("GET", "/traffic", None)))
    assert len(view.observed().arrivals) == 600
    router.given["pid"] = 2
    view.heard(read_traffic(await router.ask("GET", "/traffic", None)))
    assert len(view.observed().arrivals) == 600
    assert view.observed().plan == FleetPlan(2, 2)


@pytest.mark.slow
async def test_the_guard_is_shown_the_last_seconds_and_of_many_arrivals_fewer() -> None:
    router = Router(prompt=100)  # ten requests/s for 30 s
    planner = planner_of(router)
    await planner.look(0.0)
    await planner.look(1.0)
    asked = [path for _, path, _ in router.asked if path.startswith("/traffic")]
    assert asked[-1] == "/traffic?window=5"
    router.arrivals = [[29.0 + each / 400, 100, 20, True, [], 512, True] for each in range(400)]
    await planner.look(2.0)
    await planner.look(3.0)
    assert router.asked[-1][1] == "/traffic?window=1"
    view = TrafficView()
    view.heard(read_traffic(await Router(prompt=100).ask("GET", "/traffic", None)))
    guarded = view.observed(to_plan=False)
    assert all(guarded.now - each.at <= 5 for each in guarded.arrivals)
    assert 40 <= len(guarded.arrivals) <= 51
    assert guarded.came is None


class SlowPlanner(Planner):
    """Decides when its guard has changed the fleet, and not before."""

    def __init__(self) -> None:
        super().__init__(
            lambda plan, forecast: Expected(1.0, 0.1, forecast.rate), ProfileCapacity(load_profile(PROFILE))
        )
        self.looks, self.guarded = 0, threading.Event()

    def guard(self, observed: Observed) -> WantedPlan | None:
        self.looks += 1
        if self.looks != 2:
            return None
        self.guarded.set()
        return WantedPlan(FleetPlan(3, 1), "guard: a line")

    def decide(self, observed: Observed) -> WantedPlan:
        assert self.guarded.wait(60)
        return WantedPlan(FleetPlan(1, 3), "for the fleet as it was")


async def test_the_guard_looks_while_a_plan_is_made_and_makes_it_void(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow, router = SlowPlanner(), Router(prompt=100)
    monkeypatch.setattr(live_planner, "load_policy", lambda *_: slow)
    monkeypatch.setattr(live_planner, "LOOK_S", 0.01)
    with caplog.at_level(logging.INFO, "tercet.planner"):
        await planner_of(router, act="roles").look(0.0)
    assert router.changes == [("/engines/e2/role", {"role": "prefill"})]
    assert "a plan is void: the guard changed the fleet meanwhile" in caplog.messages
    assert not slow.verdicts


@pytest.mark.slow
async def test_the_simulating_planner_flips_roles_by_what_it_simulates() -> None:
    router = Router(prompt=8000)
    router.arrivals = [[each * 0.075, 8000, 10, True, [], 512, True] for each in range(400)]
    planner = planner_of(router, act="roles", planning=PlannerSettings(margin=0.0))
    await planner.look(0.0)
    assert router.changes == [("/engines/e2/role", {"role": "prefill"})]
    policy = planner._policy  # pyright: ignore[reportPrivateUsage]
    assert isinstance(policy, Planner)
    assert policy.simulations >= 2
    (verdict,) = policy.verdicts
    assert verdict.expected is not None
    assert verdict.expected.rate > 13


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
