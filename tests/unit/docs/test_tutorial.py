"""The tutorial's simulations, as typed, give the numbers that it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts.recipes import RECIPES, written

from tercet.cli.app import app

from .pages import DOCS, blocks
from .test_commands import command_lines

PAGE = (DOCS / "tutorial.md").read_text(encoding="utf-8")
SHOWN = ("TTFT mean, ms", "TPOT mean, ms", "TPOT P99, ms", "E2EL (JCT) mean, ms")


def rows(text: str) -> list[dict[str, str]]:
    """Of the first table in a text that has a column of TTFT, by the names of its columns."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    start = next(index for index, line in enumerate(lines) if "TTFT mean, ms" in line)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:]]
    head, _, *body = cells
    return [dict(zip(head, line, strict=True)) for line in body if len(line) == len(head)]


@pytest.mark.slow
def test_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = (block.code for block in blocks("python") if block.place.startswith("docs/tutorial.md"))
    Path("mine.py").write_text(program)
    (typed,) = (block.code for block in blocks("bash") if "dp.json split.json" in block.code)
    for words in command_lines(typed):
        capsys.readouterr()
        app(words, prog_name="tercet", standalone_mode=False)
    found = {(row[""], row["requests/s"]): row for row in rows(capsys.readouterr().out)}
    shown = rows(PAGE)
    assert len(shown) == 6
    for row in shown:
        measured = found[row[""], row["requests/s"]]
        assert {name: row[name] for name in SHOWN} == {name: measured[name] for name in SHOWN}
    assert Path("sim.png").stat().st_size > 10_000


def test_the_first_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = (block.code for block in blocks("python") if block.place.startswith("docs/tutorial.md"))
    Path("mine.py").write_text(program)
    (typed,) = (block.code for block in blocks("bash") if "--request-rate 4 --num-prompts 200" in block.code)
    (words,) = command_lines(typed)
    app(words, prog_name="tercet", standalone_mode=False)
    (shown,) = (line for line in PAGE.splitlines() if line.startswith("│    4"))
    numbers = re.findall(r"[\d.]+%?", shown)
    assert numbers in [re.findall(r"[\d.]+%?", line) for line in capsys.readouterr().out.splitlines()]


# The figures of the recipes are those that their commands print.

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
