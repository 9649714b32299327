"""``tercet chaos``: what it prints, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tercet.cli.app import _run

FLEET = ["chaos", "--seed", "5", "--minutes", "0.05", "--fleet", "1,2", "--fault-rate", "200", "--request-rate", "5"]


def test_a_plan_is_printed_and_can_be_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "faults.json"
    assert _run([*FLEET, "--plan", "--save", str(file)]) == 0
    first = capsys.readouterr().out
    assert "decode-" in first
    assert _run([*FLEET, "--plan", "--schedule", str(file)]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.slow
def test_a_run_without_violations_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run([*FLEET, "--faults", "kill,cut"]) == 0
    out = capsys.readouterr().out
    assert "no violations" in out
    assert "longest gap in a stream" in out


@pytest.mark.slow
def test_violations_end_it_with_1_and_the_command_that_runs_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run([*FLEET, "--faults", "stop", "--patience", "0.001"]) == 1
    options = "--minutes 0.05 --fleet 1,2 --faults stop --fault-rate 200 --request-rate 5 --patience 0.001"
    again = f"tercet chaos --seed 5 {options}"
    assert f"violations with seed 5; again: {again}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        ["--fleet", "3"],
        ["--faults", "rain"],
        ["--fault-rate", "0"],
        ["--faults", "clock"],
        ["--schedule", "/none"],
        ["--adversary", "rain"],
    ],
)
def test_bad_input_ends_with_2(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["chaos", *wrong]) == 2
    assert capsys.readouterr().err.startswith("tercet: ")


@pytest.mark.slow
def test_a_hostile_client_is_on_unless_it_is_turned_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run([*FLEET, "--faults", "none", "--adversary-rate", "400"]) == 0
    out = capsys.readouterr().out
    assert "a hostile client" in out
    assert "no violations" in out
    assert _run([*FLEET, "--faults", "none", "--adversary", "none"]) == 0
    assert "a hostile client" not in capsys.readouterr().out
    assert _run([*FLEET, "--faults", "none", "--adversary", "silence", "--adversary-rate", "400", "--plan"]) == 0
    assert {line.split()[-1] for line in capsys.readouterr().out.splitlines()} == {"silence"}
