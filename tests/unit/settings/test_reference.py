"""The reference has each command, flag and setting with its help, and each name that the code uses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from scripts.reference import built as building
from scripts.reference.built import NAMES, built, page

from tercet.cli.app import app
from tercet.settings import RouterConfig, declared
from tercet.settings.process_settings import INTERNAL, OF_TESTS
from tests.sources import modules

SOURCES = [path for _, path in modules()]
METRICS = {"Counter", "Gauge", "Histogram", "CounterMetricFamily", "GaugeMetricFamily", "HistogramMetricFamily"}
# Of a library that only `tercet chaos` loads into its engines.
NOT_FOR_USERS = INTERNAL | OF_TESTS | {"TERCET_TEST", "x-tercet-view"}


@cache
def trees() -> list[ast.Module]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES]


def strings(tree: ast.Module) -> Iterator[str]:
    """Every string of a file that is no docstring."""
    loose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in loose:
            yield node.value


def as_in_a_cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def leaves(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every command that runs, groups that run alone included, without hidden ones."""
    if not getattr(command, "commands", None) or (command.invoke_without_command and path != "tercet"):
        yield path, command
    for name, each in getattr(command, "commands", {}).items():
        if not each.hidden:
            yield from leaves(each, f"{path} {name}")


@pytest.mark.slow
def test_each_command_and_flag_is_described() -> None:
    sections = {text.splitlines()[0]: text for text in page("commands.md").split("\n## ")}
    seen = 0
    for path, command in leaves(typer.main.get_command(app), "tercet"):
        rows = [line.split(" | ") for line in sections[path].splitlines() if line.startswith("| `-")]
        for option in command.params:
            if option.param_type_name == "option" and not option.hidden:
                seen += 1
                (row,) = (row for row in rows if option.opts[0] in re.findall(r"(?<![\w-])--?[\w-]+", row[0]))
                about = as_in_a_cell((option.help or "").partition(" [default: ")[0])
                assert about, f"{path} {option.opts}"
                assert about in " | ".join(row), f"{path} {option.opts}"
    assert seen > 200


@pytest.mark.slow
def test_each_setting_is_described() -> None:
    text = page("settings.md")
    for each in declared(RouterConfig):
        assert f"| `{each.key}` |" in text
        assert as_in_a_cell(each.help) in text


@pytest.mark.slow
def test_pages_are_built_again_after_a_change_of_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = built()
    assert {path.name for path in folder.glob("*.md")} == {*NAMES}
    runs: list[list[str]] = []

    def run(command: list[str], **_: object) -> None:
        runs.append(command)
        for name in NAMES:
            (tmp_path / name).write_text("built")

    source = tmp_path / "src" / "module.py"
    source.parent.mkdir()
    source.write_text("FLAG = 1")
    monkeypatch.setattr(building, "FOLDER", tmp_path)
    monkeypatch.setattr(building.subprocess, "run", run)
    monkeypatch.setattr(building, "state_of_sources", lambda: str(source.stat().st_size))
    assert (page("http.md"), page("http.md"), len(runs)) == ("built", "built", 1)
    source.write_text("FLAG = 10")
    assert (built(), len(runs)) == (tmp_path, 2)
    (tmp_path / "metrics.md").unlink()
    assert (page("metrics.md"), len(runs)) == ("built", 3)


def test_the_state_of_sources_changes_with_a_file(tmp_path: Path) -> None:
    before = building.state_of_sources(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "new.py").write_text("")
    assert building.state_of_sources(tmp_path) != before


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [r"TERCET_[A-Z_]+[A-Z]", r"x-tercet-[a-z-]+"])
def test_every_name_that_the_code_uses_is_there(pattern: str) -> None:
    pages = "".join(map(page, NAMES))
    used = {name for tree in trees() for text in strings(tree) for name in re.findall(pattern, text)}
    assert used
    assert {name for name in used - NOT_FOR_USERS if f"`{name}`" not in pages} == set()


@pytest.mark.slow
def test_every_metric_is_there() -> None:
    metrics = page("metrics.md")
    named: set[str] = set()
    for tree in trees():
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id=kind), args=[ast.Constant(value=str(name)), *_]) if kind in METRICS:
                    named.add(name)
                case _:
                    pass
    assert len(named) > 20
    assert {name for name in named if f"`{name}`" not in metrics and f"`{name}_total`" not in metrics} == set()
