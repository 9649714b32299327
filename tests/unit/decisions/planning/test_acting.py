"""From a wanted fleet to engines: the smallest change, and idle engines first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tercet.decisions.planning import FleetPlan, Observed, ObservedEngine, PlanLimits
from tercet.decisions.roles import RoleController
from tercet.settings.fleet_settings import Objectives
from tercet_planner.planner import change_to

from .planned_world import Engine


def engines(prefill: int, decode: int) -> list[ObservedEngine]:
    return [ObservedEngine(f"p{each}", "prefill", waiting_s=each) for each in range(prefill)] + [
        ObservedEngine(f"d{each}", "decode", kv_usage=each / 10) for each in range(decode)
    ]


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_a_change_gives_the_plan_and_nothing_more(prefill: int, decode: int, to_prefill: int, to_decode: int) -> None:
    plan = FleetPlan(to_prefill, to_decode)
    change = change_to(plan, engines(prefill, decode))
    roles = {each.name: each.role for each in engines(prefill, decode)}
    roles |= dict(change.flips)
    kept = [role for name, role in roles.items() if name not in change.stops] + list(change.starts)
    assert (kept.count("prefill"), kept.count("decode")) == (to_prefill, to_decode)
    assert not (change.starts and change.stops)
    assert len(change.flips) <= abs(to_prefill - prefill)
    assert not set(change.stops) & {name for name, _ in change.flips}


def test_idle_engines_change_first() -> None:
    assert change_to(FleetPlan(2, 4), engines(3, 3)).flips == (("p0", "decode"),)
    assert change_to(FleetPlan(3, 2), engines(3, 3)).stops == ("d0",)
    assert not change_to(FleetPlan(3, 3), engines(3, 3))


def test_the_guard_adds_engines_where_no_role_can_give_any() -> None:
    controller, limits = RoleController(Objectives(ttft=1.0, tpot=0.025), Engine()), PlanLimits(2, 8)
    found = None
    for step in range(30):
        busy = [ObservedEngine("p0", "prefill", waiting_s=2.0 * step, busy_s=0.5 * step)]
        decoding = ObservedEngine("d0", "decode", running=200, contexts=200_000, step_s=0.03 + 1e-5 * step)
        observed = Observed(0.5 * step, 0.0, FleetPlan(1, 1), (), (*busy, decoding),
                            Objectives(ttft=1.0, tpot=0.025), limits)  # fmt: skip
        found = found or controller.on_tick(observed).plan
    assert found is not None
    assert found.engines > 2
    assert found.engines <= 8
