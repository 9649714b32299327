"""Schedules follow from their seed, keep to the fleet's shape, and survive a file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
