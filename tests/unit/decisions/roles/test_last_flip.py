"""The memory of the last change of roles, which the roles' controller and the planner share."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tercet.decisions.planning import FleetPlan
from tercet.decisions.roles import OTHER, LastFlip, Pressed

PLANS = st.builds(FleetPlan, st.integers(1, 6), st.integers(1, 6))
ROLES: st.SearchStrategy[Pressed] = st.sampled_from(["prefill", "decode"])
TIMES = st.floats(0, 1000)


def test_nothing_is_undone_before_the_first_change() -> None:
    assert not LastFlip().is_undone_by(0.0, FleetPlan(1, 3), FleetPlan(2, 2), 1e9)


@given(PLANS, PLANS, TIMES, TIMES)
def test_only_the_way_back_is_forbidden_and_only_for_its_time(
    a: FleetPlan, b: FleetPlan, at: float, later: float
) -> None:
    last = LastFlip().then(at, a, b)
    flips = (b.prefill - a.prefill) * (b.decode - a.decode) < 0
    assert (last != LastFlip()) is flips
    assert last.is_undone_by(at + later, b, a, 20.0) is (flips and at + later - at < 20.0)
    assert not last.is_undone_by(at, a, b, 20.0)


@given(st.lists(st.tuples(ROLES, st.floats(0, 30)), max_size=20))
def test_roles_do_not_swing_within_the_time(wishes: list[tuple[Pressed, float]]) -> None:
    """A caller that asks for a change at each tick gets it unless it takes back what was just given."""
    last, now = LastFlip(), 0.0
    made = list[tuple[Pressed, float]]()
    for role, pause in wishes:
        now += pause
        if not last.forbids(now, role, 20.0):
            last = LastFlip(now, role)
            made.append((role, now))
    for (role, at), (then, after) in itertools.pairwise(made):
        assert then == role or after - at >= 20.0


def test_a_change_of_others_forbids_nothing() -> None:
    last = LastFlip(5.0)
    assert not any(last.forbids(5.0, role, 1e9) for role in OTHER)


@given(PLANS, PLANS, PLANS, ROLES)
def test_added_engines_are_no_change_of_roles(a: FleetPlan, b: FleetPlan, c: FleetPlan, role: Pressed) -> None:
    last, more = LastFlip(3.0, role), FleetPlan(a.prefill + b.prefill, a.decode + c.decode)
    assert last.then(9.0, a, more) == last
    assert not last.is_undone_by(3.0, a, more, 1e9)
