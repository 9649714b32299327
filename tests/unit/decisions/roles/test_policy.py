"""When engines change roles: under lasting pressure, from a role that can spare them, and not back and forth."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tercet.decisions.planning import ObservedEngine, ObservedRequest
from tercet.decisions.roles import LASTING_S, REST_S, REVERSAL_S, FleetHistory, RoleController, RoleFlip, idlest
from tercet.protocol import BadRequest
from tercet.settings.fleet_settings import Objectives

from .fluid_fleet import OBJECTIVES, FluidFleet, Traffic, observed_now

LONG_PROMPTS = Traffic(rate=45, prefill_s=0.055, steps=80, noise=0.3)
LONG_ANSWERS = Traffic(rate=45, prefill_s=0.008, steps=1000, noise=0.3)
NOTHING = Traffic(rate=0, prefill_s=0.0, steps=1)


def fleet(prefilling: int = 3, decoding: int = 3, seed: int = 0) -> FluidFleet:
    return FluidFleet(RoleController(OBJECTIVES), prefilling, decoding, seed)


def test_objectives_are_needed() -> None:
    with pytest.raises(BadRequest, match="roles"):
        RoleController(Objectives(ttft=1.0))


@pytest.mark.parametrize(("prefilling", "decoding"), [(4, 2), (3, 3), (2, 4)])
def test_roles_follow_a_change_of_the_mix(prefilling: int, decoding: int) -> None:
    found = fleet(prefilling, decoding)
    found.run(LONG_PROMPTS, 300)
    assert found.count("prefill") >= 3
    before = len(found.flips)
    found.run(LONG_ANSWERS, 300)
    assert found.count("decode") >= 4
    assert before <= 2
    assert len(found.flips) - before <= 2
    assert found.looks[-1].pressures is not None
    assert found.looks[-1].pressures.worse < 1


def test_without_traffic_nothing_changes() -> None:
    found = fleet()
    found.run(NOTHING, 120)
    assert found.flips == []
    assert found.looks[-1].why == "no role is pressed"
    assert found.looks[-1].pressures == (0.0, 0.0)


@pytest.mark.slow
@example(rate=9.75, prefill_s=0.0625, steps=1273.0, noise=0.0, prefilling=2, decoding=1, seed=0)
@example(rate=78.5, prefill_s=0.05859375, steps=164.0, noise=0.5, prefilling=1, decoding=6, seed=9)
@example(rate=78.5, prefill_s=0.05859375, steps=161.0, noise=0.5, prefilling=1, decoding=6, seed=9)
@given(
    rate=st.floats(1, 80), prefill_s=st.floats(0.001, 0.1), steps=st.floats(2, 1500), noise=st.floats(0, 0.5),
    prefilling=st.integers(1, 6), decoding=st.integers(1, 6), seed=st.integers(0, 10),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_steady_load_ends_in_steady_roles(
    rate: float, prefill_s: float, steps: float, noise: float, prefilling: int, decoding: int, seed: int
) -> None:
    found = fleet(prefilling, decoding, seed)
    traffic = Traffic(rate, prefill_s, steps, noise)
    found.run(traffic, 240)
    assert found.count("prefill") >= 1
    assert found.count("decode") >= 1
    roles = [look.flip.role for look in found.flips if look.flip is not None]
    back = sum(one != other for one, other in itertools.pairwise(roles))
    # Noise may bring a fleet that is at the limit of both roles back once more; one that swings would do it ten times.
    assert back <= (2 if noise else 1), f"{[(look.at, look.flip) for look in found.flips]}"
    assert len(roles) <= 4
    # Where long answers make steps longer, decodes grow for minutes, and may reach the limit late.
    assert sum(look.at >= 180 for look in found.flips) <= 1


@pytest.mark.slow
@given(
    phases=st.lists(st.tuples(st.floats(0, 80), st.floats(0.001, 0.1), st.floats(2, 1500)), min_size=1, max_size=4),
    prefilling=st.integers(1, 4), decoding=st.integers(1, 4),
)  # fmt: skip
@settings(max_examples=10, deadline=None)
def test_changes_are_bounded_and_rested_after(
    phases: list[tuple[float, float, float]], prefilling: int, decoding: int
) -> None:
    found = fleet(prefilling, decoding)
    for rate, prefill_s, steps in phases:
        found.run(Traffic(rate, prefill_s, steps, 0.3), 60)
        assert found.count("prefill") >= 1
        assert found.count("decode") >= 1
    for one, other in zip(found.flips, found.flips[1:], strict=False):
        assert one.flip is not None
        assert other.flip is not None
        rest = REST_S if one.flip.role == other.flip.role else REVERSAL_S
        assert other.at - one.at >= rest


def test_the_last_engine_of_a_role_stays() -> None:
    found = fleet(1, 3)
    found.run(Traffic(rate=45, prefill_s=0.001, steps=3000), 120)
    assert found.count("prefill") == 1
    assert found.looks[-1].why.startswith("prefill has no engine to spare")


def test_a_role_that_is_pressed_itself_gives_no_engine() -> None:
    found = fleet(2, 2)
    found.run(Traffic(rate=60, prefill_s=0.1, steps=3000), 120)
    assert found.flips == []
    assert any("is pressed as well: the fleet needs more engines" in look.why for look in found.looks)


def test_an_engine_that_does_not_answer_is_not_one_of_a_role() -> None:
    found = fleet(2, 2)
    found.engines[1].reachable = False
    found.run(Traffic(rate=45, prefill_s=0.002, steps=3000), 60)
    assert found.flips == []
    found.engines[0].reachable = False
    assert found.look().why == "there must be an engine of each role that can be picked"


def engines(prefill_wait: float = 0.0, decode: float = 0.0, count: int = 3) -> list[ObservedEngine]:
    return [
        *(ObservedEngine(f"p{number}", "prefill", waiting_s=prefill_wait, busy_s=0.0) for number in range(count)),
        *(ObservedEngine(f"d{number}", "decode", running=int(decode), contexts=int(decode) * 500, step_s=0.01,
                         kv_usage=0.1) for number in range(count)),
    ]  # fmt: skip


def test_pressure_must_last() -> None:
    controller, now = RoleController(OBJECTIVES), 0.0
    while now < 10:  # calm, while decode steps are measured
        controller.on_tick(observed_now(now, engines(decode=10)))
        now += 0.5
    began = now
    while now < began + LASTING_S:
        look = controller.on_tick(observed_now(now, engines(prefill_wait=2.0, decode=10)))
        assert look.flip is None
        assert look.why.startswith("prefill has been pressed for")
        now += 0.5
    assert (
        controller.on_tick(observed_now(now, engines(decode=10))).why == "no role is pressed"
    )  # a burst that was over in time
    assert controller.on_tick(observed_now(now + 0.5, engines(prefill_wait=2.0, decode=10))).flip is None


def test_what_is_not_measured_yet_decides_nothing() -> None:
    controller = RoleController(OBJECTIVES)
    assert controller.on_tick(observed_now(0.0, engines(prefill_wait=9.0, decode=10))).why == "this is the first look"
    assert (
        controller.on_tick(observed_now(0.5, engines(prefill_wait=9.0, decode=10))).why
        == "too few decode steps have been measured"
    )


def test_an_operators_change_is_rested_after() -> None:
    controller, now = RoleController(OBJECTIVES), 0.0
    for _ in range(20):
        controller.on_tick(observed_now(now, engines(decode=10)))
        now += 0.5
    changed = engines(prefill_wait=3.0, decode=10)
    changed[0] = ObservedEngine("p0", "decode")
    looks = [controller.on_tick(observed_now(now + 0.5 * number, changed)) for number in range(10)]
    assert looks[-1].flip is None
    assert "the roles changed" in looks[-1].why


def test_engines_with_the_least_to_end_change_first() -> None:
    controller, now = RoleController(OBJECTIVES), 0.0
    found = None
    while found is None:
        busy = engines(prefill_wait=3.0 if now > 5 else 0.0, decode=10)
        busy[3] = ObservedEngine("d0", "decode", running=100, contexts=50_000, step_s=0.012, kv_usage=0.5)
        found = controller.on_tick(observed_now(now, busy)).flip
        now += 0.5
        assert now < 30
    assert found.role == "prefill"
    assert "d0" not in found.engines


@pytest.mark.slow
def test_a_line_of_prefills_hides_decodes_which_keep_their_engines() -> None:
    """What waits does not decode yet: of 48 engines that decode, as few go as relieve the prefills."""
    found = fleet(16, 48)
    found.run(Traffic(rate=100, prefill_s=0.3, steps=600, noise=0.3), 6)
    assert len(found.flips) == 1
    assert 33 <= found.count("prefill") <= 50
    found.run(Traffic(rate=100, prefill_s=0.3, steps=600, noise=0.3), 240)
    assert all(look.flip.role == "prefill" for look in found.flips if look.flip is not None)
    assert found.looks[-1].pressures is not None
    assert found.looks[-1].pressures.decode < 1


def test_looks_that_are_rare_are_compared_with_the_one_before() -> None:
    history = FleetHistory()
    assert history.observe(0.0, engines()) is None
    for now in (8.0, 20.0):
        waiting = engines(prefill_wait=now / 4)
        demand = history.observe(now, waiting)
        assert demand is not None
        assert demand.over_s == now - (0.0 if now == 8.0 else 8.0)
        assert demand.prefill == pytest.approx(3 / 4)


class Profiled:
    """5,000 prompt tokens per second; 100 decodes at any TPOT."""

    def prefill_s(self, tokens: int) -> float:
        return tokens / 5_000

    def decodes(self, context: float, tpot: float) -> int:
        return 100


def overloaded(now: float) -> tuple[ObservedRequest, ...]:
    """Twenty requests in the last second, of 0.2 s of prefill each."""
    return tuple(ObservedRequest(now - 1 + each / 20, 1000, 20, True) for each in range(20))


def test_a_change_by_an_overload_rests_as_one_by_pressure() -> None:
    controller, found, why, now = RoleController(OBJECTIVES, Profiled()), None, "", 0.0
    idle = [ObservedEngine(f"d{each}", "decode") for each in range(5)]
    while found is None:
        line = [ObservedEngine("p0", "prefill", waiting_s=3 * now, busy_s=now)]
        taken = controller.on_tick(observed_now(now, [*line, *idle], overloaded(now)))
        found, why = taken.flip, taken.why
        now += 0.5
        assert now < 3
    assert (found.role, why) == ("prefill", found.reason)
    assert found.reason.startswith("the prefills of the last")
    assert set(found.engines) < {"d0", "d1", "d2", "d3", "d4"}
    changed = [ObservedEngine(each.name, "prefill" if each.name in found.engines else "decode") for each in idle]
    for number in range(int(REST_S - 1) * 2):
        line = [ObservedEngine("p0", "prefill", waiting_s=30.0, busy_s=now + number / 2)]
        look = controller.on_tick(observed_now(now + number / 2, [*line, *changed]))
        assert look.flip is None
        why = look.why
    assert "rest for 10 s" in why


def test_engines_that_began_to_decode_are_not_taken_back_at_once() -> None:
    controller, flip, now = RoleController(OBJECTIVES, Profiled()), None, 0.0
    while flip is None:  # decodes press: their steps take longer than the objective
        engines = [*(ObservedEngine(f"p{each}", "prefill") for each in range(3)),
                   *(ObservedEngine(f"d{each}", "decode", running=10 + int(10 * now), contexts=5_000, step_s=0.03)
                     for each in range(3))]  # fmt: skip
        flip = controller.on_tick(observed_now(now, engines)).flip
        now += 0.5
        assert now < 30
    assert flip.role == "decode"
    began = now - 0.5
    roles = dict.fromkeys(("p0", "p1", "p2"), "prefill") | dict.fromkeys((*flip.engines, "d0", "d1", "d2"), "decode")
    flips = list[tuple[float, RoleFlip]]()
    while not flips:
        assert now < began + REVERSAL_S + 5
        engines = [ObservedEngine(name, "prefill", waiting_s=3 * (now - began), busy_s=now - began) if role == "prefill"
                   else ObservedEngine(name, "decode") for name, role in roles.items()]  # fmt: skip
        flip = controller.on_tick(observed_now(now, engines, overloaded(now))).flip
        flips += [(now, flip)] if flip is not None else []
        now += 0.5
    assert flips[0][1].role == "prefill"
    assert flips[0][0] == began + REVERSAL_S


def test_those_with_the_least_work_left_change_first() -> None:
    engines = [
        ObservedEngine("busy", "decode", kv_usage=0.5), ObservedEngine("idle", "decode"),
        ObservedEngine("line", "decode", waiting_s=1.0),
    ]  # fmt: skip
    assert idlest(engines, 2) == ("idle", "busy")
