"""House rules that no linter checks."""

from __future__ import annotations

from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "tercet"
MOST_LINES = 475


def test_no_module_is_called_utils() -> None:
    found = [str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*") if path.stem in ("utils", "util", "helpers")]
    assert not found, f"name these after what is in them: {', '.join(found)}"


def test_no_source_file_is_too_long() -> None:
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    found = [f"{name} ({lines} lines)" for name, lines in sorted(lengths.items()) if lines > MOST_LINES]
    assert not found, f"split these, {MOST_LINES} lines is the most: {', '.join(found)}"
