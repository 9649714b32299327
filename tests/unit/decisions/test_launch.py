"""The launch rule: the closest ratio with at least one engine of each role, for every size of a fleet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.decisions.planning import RoleRatio, launch_order, ratio_of, split
from tercet.protocol import BadRequest


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
