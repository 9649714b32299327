"""Labels of points lie on nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from benchmarks.transfer.cases import KIB, MIB, Table, cases
from benchmarks.transfer.measurement import rows
from benchmarks.transfer.transfer_figure import draw_transfer
from hypothesis import given
from hypothesis import strategies as st

from tercet_lab.drawing import Box, place

from .golden_images import check_image

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


# The picture of ``python -m benchmarks.transfer``.

RATES = {
    "memcpy": 8.0, "socket x1": 2.0, "socket x4": 3.4, "chunks x2": 2.2, "host": 6.0, "tcp": 2.4, "nixl": 1.5,
    "nixl direct": 1.7,
}  # fmt: skip


def measured(rounds: int = 7) -> Table:
    table, chance = Table(order=[*RATES, "mooncake"]), random.Random(1)
    for case in cases([6 * KIB, 96 * KIB, 1024 * KIB], [1 * MIB, 64 * MIB]):
        for way, best in RATES.items():
            for _ in range(rounds):
                rate = best * case.chunk_bytes / (case.chunk_bytes + 20 * KIB) * chance.uniform(0.85, 1.1)
                table.add(way, case, case.moved_bytes / rate / 1e9)
        table.fail("mooncake", case, "not installed")
    return table


@pytest.mark.slow
def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = lambda file: draw_transfer(measured(), file, "A machine, 2026-01-01")  # noqa: E731
    check_image("transfer.png", draw, tmp_path, monkeypatch)


@pytest.mark.slow
def test_one_round_and_few_ways_are_drawn_too(tmp_path: Path) -> None:
    table = Table(order=["memcpy"])
    (case,) = cases([6 * KIB], [MIB])
    table.add("memcpy", case, 0.001)
    draw_transfer(table, tmp_path / "a.svg", "")
    assert "Medians of 1 rounds" in (tmp_path / "a.svg").read_text(encoding="utf-8")


def test_the_table_has_units_in_its_head_and_three_figures() -> None:
    head, lines = rows(measured(1))
    assert head[:2] == ["chunk, KiB", "total, MiB"]
    assert lines[0][:2] == ["6", "1"]
    assert all(len(cell.replace(".", "").lstrip("0")) == 3 for cell in lines[0][2:-1])
    assert lines[0][-1] == "-"
