"""Labels of points lie on nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet_lab.drawing import Box, place

FRAME = Box(0, 0, 100, 100)
COORDINATE = st.floats(0, 100)
POINTS = st.lists(st.tuples(COORDINATE, COORDINATE), max_size=12)


@given(POINTS, st.floats(1, 40), st.floats(1, 20))
def test_no_label_lies_on_another_one_on_what_is_taken_or_outside(
    points: list[tuple[float, float]], width: float, height: float
) -> None:
    taken = [Box.around(x, y, 4, 4) for x, y in points]
    placed = place(points, [(width, height)] * len(points), taken, FRAME, 3)
    there = [box for box in placed if box is not None]
    assert len(placed) == len(points)
    assert all(box.within(FRAME) for box in there)
    assert not any(box.overlaps(other) for box in there for other in taken)
    assert not any(box.overlaps(other) for index, box in enumerate(there) for other in there[:index])


def test_a_lone_label_is_right_of_its_point_and_one_at_the_edge_left_of_it() -> None:
    lone, edge = (place([(x, 50)], [(20, 6)], [], FRAME, 3)[0] for x in (30, 95))
    assert lone is not None
    assert edge is not None
    assert (lone.left, edge.right) == (pytest.approx(33), pytest.approx(92))


def test_no_room_is_no_label() -> None:
    assert place([(50, 50)], [(120, 6)], [], FRAME, 3) == [None]


def test_the_distance_of_a_point() -> None:
    box = Box(10, 10, 20, 20)
    assert (box.distance(15, 15), box.distance(5, 15), box.distance(24, 23)) == (0, 5, 5)
