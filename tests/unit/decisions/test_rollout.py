"""Roles of a fleet that is launched, and steps of a rollout: the closest ratio for every size, and back on the first
sign that the new fleet is not well.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.decisions.planning import RoleRatio, launch_order, ratio_of, split
from tercet.protocol import BadRequest
from tercet_gateway.upgrading import Rollout, RolloutPlan, Seen

PLAN = RolloutPlan((0.1, 0.5, 1.0), hold_s=10.0, tolerance=0.01)
IDLE = Seen()


def test_each_share_is_held_and_the_last_one_too() -> None:
    rollout, now = Rollout(PLAN), 0
    shares = list[float]()
    for now in range(0, 60, 5):
        if rollout.look(now, IDLE, IDLE):
            shares.append(rollout.share)
        if rollout.state == "shifted":
            break
    assert (shares, now, rollout.share) == ([0.1, 0.5, 1.0], 30, 1.0)


@pytest.mark.parametrize(
    ("old", "new", "state"),
    [
        (Seen(1000, 0), Seen(100, 0), "shifting"),
        (Seen(1000, 0), Seen(100, 1), "shifting"),  # 1%: within the tolerance
        (Seen(1000, 0), Seen(100, 2), "returned"),
        (Seen(1000, 50), Seen(100, 5), "shifting"),  # as bad as the old one
        (Seen(1000, 50), Seen(100, 7), "returned"),
        (Seen(0, 0), Seen(1, 1), "returned"),
        (Seen(1000, 0), Seen(100, 0, answers=False), "returned"),
    ],
)
def test_errors_of_the_new_fleet_return_at_once(old: Seen, new: Seen, state: str) -> None:
    rollout = Rollout(PLAN)
    rollout.look(0, IDLE, IDLE)
    rollout.look(1, old, new)
    assert rollout.state == state
    assert (rollout.share == 0) is (state == "returned") is bool(rollout.why)


def test_errors_before_a_step_are_not_counted_in_it() -> None:
    rollout = Rollout(PLAN)
    rollout.look(0, Seen(500, 0), Seen(10, 9))
    assert not rollout.look(9, Seen(600, 0), Seen(20, 9))
    assert rollout.look(10, Seen(600, 0), Seen(20, 9))
    assert (rollout.state, rollout.share) == ("shifting", 0.5)


def test_one_that_was_broken_off_goes_on_from_its_share() -> None:
    rollout = Rollout(PLAN, present=0.5)
    assert rollout.look(0, IDLE, IDLE)
    assert rollout.share == 1.0


def test_giving_up_changes_the_share_once() -> None:
    rollout = Rollout(PLAN)
    assert not rollout.give_up("not begun")
    rollout = Rollout(PLAN)
    rollout.look(0, IDLE, IDLE)
    assert rollout.give_up("stopped")
    assert not rollout.look(100, IDLE, IDLE)
    assert (rollout.state, rollout.why) == ("returned", "stopped")


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 20), st.integers(0, 3), st.booleans()), max_size=30))
def test_the_share_only_rises_until_all_or_nothing(looks: list[tuple[float, int, int, bool]]) -> None:
    rollout, now, new, before = Rollout(PLAN), 0.0, IDLE, 0.0
    for passed, requests, failures, answers in looks:
        now += passed
        new = Seen(new.requests + requests, new.failures + min(failures, requests), 0, answers)
        rollout.look(now, IDLE, new)
        assert rollout.share >= before or (rollout.state, rollout.share) == ("returned", 0.0)
        before = rollout.share
    assert (rollout.state == "shifted") <= (rollout.share == 1.0)


@pytest.mark.parametrize("steps", [(), (0.5,), (0.5, 0.5, 1.0), (0.0, 1.0), (0.5, 1.5), (1.0, 0.5)])
def test_steps_that_cannot_be(steps: tuple[float, ...]) -> None:
    with pytest.raises(BadRequest, match="must rise from above 0 to 100 percent"):
        RolloutPlan(steps)


@pytest.mark.parametrize(
    ("instances", "ratio", "wanted"),
    [
        (2, "1:1", (1, 1)),
        (3, "1:1", (1, 2)),  # of two equally close, more decode
        (4, "1:1", (2, 2)),
        (5, "1:1", (2, 3)),
        (2, "1:9", (1, 1)),  # at least one of each
        (10, "1:9", (1, 9)),
        (11, "1:9", (1, 10)),
        (15, "1:9", (1, 14)),
        (16, "1:9", (2, 14)),
        (2, "9:1", (1, 1)),
        (10, "9:1", (9, 1)),
        (3, "2:1", (2, 1)),
        (4, "2:1", (3, 1)),
        (5, "2:1", (3, 2)),
        (8, "1:3", (2, 6)),
        (100, "3:5", (37, 63)),  # 37.5 is half way
        (1024, "1:9999", (1, 1023)),
    ],
)
def test_the_closest_ratio(instances: int, ratio: str, wanted: tuple[int, int]) -> None:
    assert split(instances, ratio_of(ratio)) == wanted


parts = st.integers(1, 9999)


@given(st.integers(2, 200), st.builds(RoleRatio, parts, parts))
def test_no_other_split_is_closer(instances: int, ratio: RoleRatio) -> None:
    def distance(prefill: int) -> tuple[int, int]:
        return abs(prefill * ratio.decode - (instances - prefill) * ratio.prefill), prefill

    found = split(instances, ratio)
    assert sum(found) == instances
    assert found.prefill == min(range(1, instances), key=distance)


@given(st.integers(2, 100), st.builds(RoleRatio, parts, parts))
def test_each_beginning_of_the_order_is_the_rule_for_its_size(instances: int, ratio: RoleRatio) -> None:
    order = launch_order(instances, ratio)
    assert len(order) == instances
    for size in range(2, instances + 1):
        begun = order[:size]
        assert (begun.count("prefill"), begun.count("decode")) == split(size, ratio)


@pytest.mark.parametrize("text", ["", "1", "1:", "0:1", "1:0", "1:1:1", "-1:1", "1.5:1", "1:10000", "a:b", "1:\uff11"])
def test_what_is_not_a_ratio_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="is not a ratio such as 1:3"):
        ratio_of(text)
