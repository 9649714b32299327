"""examples/history_and_science.py does what docs/programs.md says of it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tercet_lab.sim import run_virtual

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
