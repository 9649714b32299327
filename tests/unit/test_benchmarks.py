"""Command lines of `benchmarks/` and of the profile's script: one line for wrong use, and exit code 2."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from benchmarks.command_line import run_with
from benchmarks.context import context
from benchmarks.long_names import long_names
from benchmarks.migration.__main__ import migration
from benchmarks.transfer.__main__ import transfer
from scripts.silicon_profile.__main__ import import_silicon

COMMANDS: dict[str, Any] = {
    "context": context,
    "transfer": transfer,
    "migration": migration,
    "silicon": import_silicon,
    "names": long_names,
}
PROFILE = "--name x --model m -o"


@pytest.mark.parametrize(
    ("line", "begins"),
    [
        ("transfer --nope", "No such option: --nope"),
        ("transfer --chunk x", "--chunk: 'x' is not a comma-separated list of numbers"),
        ("transfer --total 0", "--total: "),
        ("transfer --total nan,inf", "--total: "),
        ("transfer --backend foo", "--backend: 'foo' is unknown"),
        ("transfer --engine x", "--engine: 'x' is not a URL"),
        ("migration a b", "SOURCE_URL: 'a' is not a URL"),
        ("migration http://h:1 http://h:2 --lengths 1.5", "--lengths: "),
        ("migration http://h:1 http://h:2 --ways foo", "--ways: 'foo' is unknown"),
        ("context a http://h:1 http://h:2", "ENGINE: 'a' is not a URL"),
        ("context http://h:1 http://h:2 http://h:3 --lengths 0", "--lengths: "),
        ("names --url x", "--url: 'x' is not a URL"),
        ("names --pid 0", "--pid: no process 0 runs"),
        (f"silicon {PROFILE} /nowhere/x.json", "--output"),
        (f"silicon {PROFILE} x.json --python /not/here", "--python"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    line: str, begins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *arguments = shlex.split(line)
    assert run_with(COMMANDS[name], name, arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"tercet: {begins}")
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with(COMMANDS[name], name, ["--help"]) == 0
    assert "Usage" in capsys.readouterr().out
