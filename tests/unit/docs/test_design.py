"""The map of design.md is the table of layers."""

from __future__ import annotations

import re

from tests.unit.test_layers import BESIDE, LAYERS

from .pages import DOCS

PAGE = (DOCS / "design.md").read_text(encoding="utf-8")
# Names stand in these columns, behind the number of the floor; what is in them is said behind.
NAMES = slice(4, 38)


def test_the_map_has_the_floors_of_the_table() -> None:
    drawing = PAGE.split("```")[1]
    floors, _, packages = drawing.partition(" packages\n")
    shown: dict[int, set[str]] = {}
    floor = -1
    for line in floors.splitlines():
        if number := re.match(r" (\d) ", line):
            floor = int(number[1])
            assert floor not in shown
        shown.setdefault(floor, set()).update(line[NAMES].split())
    shown.pop(-1)  # the empty line before the first floor
    assert shown == LAYERS
    assert list(shown) == sorted(shown, reverse=True)
    assert {name for line in packages.splitlines() for name in line[NAMES].split()} == BESIDE.keys()
