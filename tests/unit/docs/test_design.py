"""The map of design.md is the table of layers, and its walks pass few files."""

from __future__ import annotations

import re

import pytest

from tests.sources import PRODUCT
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


# A walk that passes more files than these is too long: merge what one must read together.
MOST_FILES = {
    "A chat request, from socket to socket": 16,
    "An abort, from socket to vLLM": 10,
    "A KV block, from cache to cache": 17,
    "A move, from one engine to another": 10,
    "A setting, from declaration to use": 5,
}


def files_of(walk: str) -> set[str]:
    """The files that the numbered steps of a walk name, some of them by the end of their path."""
    section = PAGE.split(f"## {walk}\n")[1].split("\n## ")[0]
    steps = re.findall(r"^\d+\. .*(?:\n .*)*", section, re.MULTILINE)
    names = {name for step in steps for name in re.findall(r"`([\w/]+\.py)`", step)}
    paths = [path.relative_to(PRODUCT).as_posix() for path in PRODUCT.rglob("*.py")]
    found = {name: [path for path in paths if f"/{path}".endswith(f"/{name}")] for name in names}
    assert all(len(places) == 1 for places in found.values()), found
    return {places[0] for places in found.values()}


@pytest.mark.parametrize("walk", MOST_FILES)
def test_a_walk_passes_few_files(walk: str) -> None:
    files = files_of(walk)
    assert 3 < len(files) <= MOST_FILES[walk], sorted(files)


def test_every_walk_is_counted() -> None:
    assert set(re.findall(r"^## (An? .+, from .+)$", PAGE, re.MULTILINE)) == MOST_FILES.keys()
