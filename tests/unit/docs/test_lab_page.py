"""The programs of docs/lab.md run as they are printed, one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "lab.md"


@pytest.mark.slow
def test_its_programs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {"__name__": "page"}
    for number, program in enumerate(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)):
        exec(compile(program, f"docs/lab.md, program {number}", "exec"), found)
    assert len((tmp_path / "requests.csv").read_text().splitlines()) == 401
    assert len(found["ttft"]) == 400
    assert found["best"]["rate"] == "12"
    assert "1P3D" in found["planned"].plans["plan"], "16 requests/s, 6 for each engine"
    assert (tmp_path / "ttft.pdf").stat().st_size > 1000
