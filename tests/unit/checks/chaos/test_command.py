"""``tercet chaos``: what it prints, and how it ends."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.cli.app import _run
from tercet.protocol import BadRequest
from tercet_checks.chaos.chaos_report import (
    KINDS,
    ON_PROCESSES,
    FaultSchedule,
    FleetShape,
    load_schedule,
    parse_kinds,
    plan_faults,
)

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


# Schedules follow from their seed, keep to the fleet's shape, and survive a file.


def shape_of(engines: int, spare: int = 1) -> FleetShape:
    return FleetShape(
        engines=tuple(f"e{index}" for index in range(engines)), kinds=KINDS, processes=("engine", "api", "core"),
        shortest=0.1, longest=5.0, hang_seconds=30.0, recovery=1.0, spare=spare,
    )  # fmt: skip


def test_the_same_seed_is_the_same_schedule_and_another_one_is_not() -> None:
    first, again, other = (plan_faults(seed, shape_of(10), 2, 200) for seed in (3, 3, 4))
    assert first == again
    assert first.faults != other.faults
    assert len(first.faults) > 100


@given(seed=st.integers(0, 1000), engines=st.integers(2, 12), spare=st.integers(0, 3))
def test_no_engine_has_two_at_once_and_some_have_none(seed: int, engines: int, spare: int) -> None:
    if engines <= spare:
        return
    shape = shape_of(engines, spare)
    schedule = plan_faults(seed, shape, 1, 300)
    assert list(schedule.faults) == sorted(schedule.faults, key=lambda fault: fault.at)
    for fault in schedule.faults:
        assert 0 <= fault.at < 60
        assert fault.seconds == 30.0 if fault.kind == "hang" else 0.1 <= fault.seconds <= 5.0
        assert fault.process == "engine" or fault.kind in ON_PROCESSES
        assert bool(fault.step) is (fault.kind == "clock")
        now = [other for other in schedule.faults if other.at <= fault.at < other.at + other.seconds + shape.recovery]
        assert len(now) == len({other.engine for other in now}) <= engines - spare
        assert sum(other.kind == "hang" for other in now) <= max(1, engines // 10) + 1


def test_all_kinds_and_processes_happen() -> None:
    found = Counter((fault.kind, fault.process) for fault in plan_faults(0, shape_of(40), 5, 500).faults)
    assert {kind for kind, _ in found} == set(KINDS)
    assert {process for kind, process in found if kind == "kill"} == {"engine", "api", "core"}


def test_a_file_says_the_same(tmp_path: Path) -> None:
    schedule, file = plan_faults(5, shape_of(5), 1, 100), tmp_path / "faults.json"
    file.write_bytes(schedule.to_json())
    assert load_schedule(file) == schedule
    assert len(file.read_text().splitlines()) == len(schedule.faults) + 2  # one a line, for people


@pytest.mark.parametrize("text", ["{", '{"seed": 1}', '{"seed": 1, "seconds": 1, "faults": [{"kind": "rain"}]}'])
def test_a_wrong_file_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "faults.json"
    file.write_text(text)
    with pytest.raises(BadRequest, match=r"faults\.json"):
        load_schedule(file)
    with pytest.raises(BadRequest, match="cannot be read"):
        load_schedule(tmp_path / "none.json")


def test_an_empty_schedule_can_be_written_and_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(FaultSchedule(1, 60.0, ()).to_json())
    assert load_schedule(tmp_path / "f").faults == ()


def test_kinds_by_name() -> None:
    assert parse_kinds("cut, full-kv,kill") == ("kill", "cut", "full_kv")
    with pytest.raises(BadRequest, match="rain"):
        parse_kinds("kill,rain")


def test_what_cannot_happen_is_refused() -> None:
    shape = msgspec.structs.replace(shape_of(3), kinds=("kill",))
    with pytest.raises(BadRequest, match="clock"):
        plan_faults(0, shape, 1, 10, ["clock"])
    with pytest.raises(BadRequest, match="needs at least"):
        plan_faults(0, shape_of(1), 1, 10)
    for minutes, rate, kinds in ((0, 10, None), (1, 0, None), (1, 10, [])):
        with pytest.raises(BadRequest, match="positive"):
            plan_faults(0, shape, minutes, rate, kinds)
