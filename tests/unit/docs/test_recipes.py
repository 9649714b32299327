"""The figures of the recipes are those that their commands print."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts.recipes import RECIPES, written

PAGES = sorted(path for path in RECIPES.glob("*.md") if "tercet sim" in path.read_text())


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_figures_are_what_the_command_prints(path: Path) -> None:
    page = path.read_text()
    assert "| ? |" not in page
    assert written(page) == page


def test_most_recipes_have_figures() -> None:
    assert len(PAGES) == 6
