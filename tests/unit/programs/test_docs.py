"""docs/programs.md names every built-in program and each of its parameters, with its default."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tercet.programs import BUILT_IN
from tercet_lab.sim import run_virtual

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "programs.md").read_text()


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_program_and_each_of_its_parameters_is_there(name: str) -> None:
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    for parameter in inspect.signature(BUILT_IN[name]).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            assert f"`{parameter.name}`" in row or f"`{parameter.name}={parameter.default}`" in row


# examples/history_and_science.py does what docs/programs.md says of it.

FILE = Path(__file__).resolve().parents[3] / "examples" / "history_and_science.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("history_and_science", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_moving_the_context_follows_the_traffic(
    example: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = run_virtual(example.story())
    (_, shifted, moved), sent = told
    assert moved.seconds["science"] < 0.9 * shifted.seconds["science"]
    assert (sent.begin, sent.end) == (0, example.CONTEXT)
    assert sent.usage.computed <= 16  # no forward pass but for the last block
    monkeypatch.setattr(example, "run_virtual", lambda story: story.close() or told)
    example.main()
    assert "engine-1 moved" in capsys.readouterr().out
