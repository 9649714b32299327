"""House rules that no linter checks."""

from __future__ import annotations

from tests.sources import PACKAGES, PRODUCT, modules

MOST_LINES = 700
UNSAYING = ("utils", "util", "helpers")


def test_no_module_is_called_utils() -> None:
    found = [str(path) for top in (PRODUCT, *PACKAGES.values()) for path in top.rglob("*") if path.stem in UNSAYING]
    assert not found, f"name these after what is in them: {', '.join(found)}"


def test_no_source_file_is_too_long() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules()}
    found = [f"{name} ({lines} lines)" for name, lines in sorted(lengths.items()) if lines > MOST_LINES]
    assert not found, f"split these, {MOST_LINES} lines is the most: {', '.join(found)}"
