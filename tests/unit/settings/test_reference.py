"""docs/reference is what the code declares, and what the code uses is declared."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tercet.settings.process_settings import INTERNAL, OF_TESTS
from tests.sources import modules

ROOT = Path(__file__).resolve().parents[3]
REFERENCE = ROOT / "docs" / "reference"
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


@pytest.mark.slow
def test_the_pages_are_what_is_declared() -> None:
    # In a process of its own: metrics of all commands beside one another would not be registered in one.
    command = [sys.executable, "-m", "scripts.reference", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [r"TERCET_[A-Z_]+[A-Z]", r"x-tercet-[a-z-]+"])
def test_every_name_that_the_code_uses_is_there(pattern: str) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    used = {name for tree in trees() for text in strings(tree) for name in re.findall(pattern, text)}
    assert used
    assert {name for name in used - NOT_FOR_USERS if f"`{name}`" not in pages} == set()


@pytest.mark.slow
def test_every_metric_is_there() -> None:
    page = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
    named: set[str] = set()
    for tree in trees():
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id=kind), args=[ast.Constant(value=str(name)), *_]) if kind in METRICS:
                    named.add(name)
                case _:
                    pass
    assert len(named) > 20
    assert {name for name in named if f"`{name}`" not in page and f"`{name}_total`" not in page} == set()
