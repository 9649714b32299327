"""The table of processes that end names a test for each row, and these tests exist."""

from __future__ import annotations

import re

import pytest

from .pages import DOCS, ROOT

HEAD = "| what ends | who restarts it | meanwhile | test |"
_TABLE = (DOCS / "operations.md").read_text().split(HEAD, 1)[1].split("\n\n", 1)[0]
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in _TABLE.strip().splitlines()[1:]]
TESTS = {
    name
    for file in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
}


def test_the_table_has_the_processes_of_a_fleet() -> None:
    said = " ".join(row[0] for row in ROWS)
    for process in (
        "engine", "grammars", "router", "worker", "guard", "planner", "model-router", "epp", "sidecar",
    ):  # fmt: skip
        assert process in said, process


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_each_row_has_its_test(number: int) -> None:
    row = ROWS[number]
    assert len(row) == 4, row
    named = re.findall(r"`(test_\w+)`", row[3] if row[3] != "the same" else ROWS[number - 1][3])
    assert named, row[0]
    assert TESTS.issuperset(named), set(named) - TESTS
