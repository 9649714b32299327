"""The notebooks in `examples/`: their cells run, one after the other, and their figures are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
LONGEST = 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "figures", "said"),
    [
        ("goodput", {"attainment.pdf", "goodput.pdf"}, "disaggregated: 3"),
        ("rescheduling", {"ttft.pdf", "no-moves.pdf", "moves.pdf"}, "moves: P99 TTFT 0.1"),
    ],
)
def test_its_cells_run(
    name: str, figures: set[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / f"{name}.ipynb").read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    for cell in code:
        exec(compile(cell, f"{name}.ipynb", "exec"), names)
    assert {file.name for file in tmp_path.iterdir()} == figures
    assert said in capsys.readouterr().out
    assert sum(len(cell.splitlines()) for cell in code) <= LONGEST


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda file: file.stem)
def test_it_is_stored_without_output(file: Path) -> None:
    cells = json.loads(file.read_text("utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
