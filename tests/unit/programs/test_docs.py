"""docs/programs.md names every built-in program and each of its parameters, with its default."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tercet.programs import BUILT_IN

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "programs.md").read_text()


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_program_and_each_of_its_parameters_is_there(name: str) -> None:
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    for parameter in inspect.signature(BUILT_IN[name]).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            assert f"`{parameter.name}`" in row or f"`{parameter.name}={parameter.default}`" in row
