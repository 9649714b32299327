"""The house: files and functions that one can read, and no word that people of this field do not use."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest

from tests.sources import PACKAGES, PRODUCT, modules

# Names of files that say nothing without their folder: each may be there once.
VAGUE = {"base", "checks", "config", "core", "loading", "messages", "metrics", "options", "report", "reports", "run",
         "spec", "stream"}  # fmt: skip
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 700, 80
# What these words were for has a name in the field.
RETIRED = {
    "short way": "streaming fast path",
    "tap": "output callback or observer",
    "voice": "output stream",
    "recut": "block-size conversion",
    "chooser": "picker",
    "hearing": "engine observer",
    "live word": "generation word",
    "tempo": "arrival rate",
}


def words_of(text: str) -> str:
    """Text with names taken apart: ``ShortWay`` and ``short_way`` are both ``short way``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).replace("_", " ").replace("-", " ").lower()


@pytest.mark.slow
def test_a_file_and_a_function_can_be_read_at_once() -> None:
    long: list[str] = []
    for name, path in modules():
        text = path.read_text()
        if (lines := text.count("\n")) > MOST_LINES_OF_A_FILE:
            long.append(f"{name} has {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MOST_LINES_OF_A_FUNCTION:
                    long.append(f"{name}:{node.lineno} {node.name} has {lines} lines")
    assert not long, f"split these where two parts can be understood alone: {'; '.join(long)}"


def test_no_two_files_have_a_name_that_says_nothing() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, path in modules():
        if path.stem in VAGUE:
            found[path.stem].append(name)
    twice = [", ".join(sorted(where)) for where in found.values() if len(where) > 1]
    assert not twice, f"one has to open these to tell them apart: {'; '.join(twice)}"


@cache
def lines_of_words() -> tuple[tuple[str, str], ...]:
    """Every line of the package, with names taken apart, after the place where it is."""
    return tuple(_lines_of_words())


def _lines_of_words() -> Iterator[tuple[str, str]]:
    for name, path in modules():
        for number, line in enumerate(words_of(path.read_text()).splitlines(), 1):
            yield f"{name}:{number}", line


@pytest.mark.slow
@pytest.mark.parametrize("word", RETIRED)
def test_retired_words_stay_away(word: str) -> None:
    pattern = re.compile(rf"\b{re.escape(word)}s?\b")
    found = [place for place, line in lines_of_words() if pattern.search(line)]
    assert not found, f"say {RETIRED[word]}: {', '.join(found)}"


def test_names_are_taken_apart() -> None:
    assert words_of("class ShortWay: short_way, short-way") == "class short way: short way, short way"


# House rules that no linter checks.

MOST_LINES = 700
UNSAYING = ("utils", "util", "helpers")


def test_no_module_is_called_utils() -> None:
    found = [str(path) for top in (PRODUCT, *PACKAGES.values()) for path in top.rglob("*") if path.stem in UNSAYING]
    assert not found, f"name these after what is in them: {', '.join(found)}"


def test_no_source_file_is_too_long() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules()}
    found = [f"{name} ({lines} lines)" for name, lines in sorted(lengths.items()) if lines > MOST_LINES]
    assert not found, f"split these, {MOST_LINES} lines is the most: {', '.join(found)}"
