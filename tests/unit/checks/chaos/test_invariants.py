"""Invariants of runs of faults: what breaks one is found, in simulated fleets and with a wrong clock."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tercet.decisions.migration import Stage
from tercet.protocol import Output, SequenceReport
from tercet.router.serve.moves import MoveRecord
from tercet.wire.streams.wire_format import TokenDelta
from tercet_checks.chaos.chaos_report import (
    ORPHANS,
    ChaosResult,
    ClientRecord,
    FaultKind,
    FaultSchedule,
    InjectedFault,
    Leftover,
    Piece,
    PlannedFault,
    difference,
    fault_rows,
    figures,
    move_rows,
    plan_faults,
    stalled,
    unanswered,
    violation_lines,
    violations_of,
    wrong_answers,
)
from tercet_checks.chaos.real_arena import is_owned
from tercet_checks.chaos.real_fleet import WrongClock, build, can_be_built
from tercet_checks.chaos.simulated_arena import REST_SECONDS, SIMULATED_LOAD, SimulatedFleet, run_simulated
from tercet_lab.sim import SimEngine

CALM: dict[int, tuple[Piece, ...]] = {0: (1, 2, 3, 4, 5, 6, 7, 8)}


def record_of(*pieces: Piece, outcome: str = "answered", error: str = "", every: float = 1.0) -> ClientRecord:
    received = [(index * every, (piece,)) for index, piece in enumerate(pieces)]
    ended = None if outcome == "pending" else len(pieces) * every
    return ClientRecord(
        name="r", question=0, began=0.0, received=received, outcome=outcome, ended=ended, error=error  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_calm_run_breaks_nothing() -> None:
    assert violations_of([record_of(*CALM[0])], CALM, [], 60.0) == []


def test_what_has_no_end_is_found() -> None:
    assert [found.subject for found in unanswered([record_of(1, outcome="pending"), record_of(*CALM[0])])] == ["r"]


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ((1, 2, 3, 3, 4, 5, 6, 7, 8), "token 2 is repeated at 3"),
        ((1, 2, 3, 4, 1, 2, 3, 4, 5), "token 0 is repeated at 4"),
        ((1, 2, 4, 5, 6, 7, 8), "1 tokens are missing at 2"),
        ((1, 2, 9, 4, 5, 6, 7, 8), "token 2 is 9 instead of 3"),
        ((1, 2), "too few: 2 tokens instead of 8"),
        ((1, 2, 3, 4, 5, 6, 7, 8, 9), "too many: 9 tokens instead of 8"),
        ((), "too few: 0 tokens instead of 8"),
    ],
)
def test_how_an_answer_is_wrong(pieces: tuple[Piece, ...], why: str) -> None:
    assert difference(pieces, CALM[0], whole=True) == why
    (found,) = wrong_answers([record_of(*pieces)], CALM)
    assert why in found.detail


@pytest.mark.parametrize("outcome", ["failed", "left", "pending"])
def test_an_answer_that_is_not_whole_is_right_as_far_as_it_goes(outcome: str) -> None:
    assert not list(wrong_answers([record_of(1, 2, 3, outcome=outcome)], CALM))
    assert list(wrong_answers([record_of(1, 3, outcome=outcome)], CALM))


def test_text_is_compared_as_a_whole_however_it_was_cut() -> None:
    calm: dict[int, tuple[Piece, ...]] = {0: ("hello world",)}
    assert not list(wrong_answers([record_of("hel", "lo", " world")], calm))
    assert "too few" in next(wrong_answers([record_of("hel")], calm)).detail
    assert "character 3 is 'p'" in next(wrong_answers([record_of("help", " world")], calm)).detail


def test_silence_is_found_before_the_first_token_between_two_and_before_an_error() -> None:
    quiet = [record_of(1, 2, every=20.0), record_of(outcome="failed")]
    quiet[1].ended = 11.0
    assert len(list(stalled(quiet, 10.0))) == 2
    assert not list(stalled(quiet, 30.0))
    late = record_of(1)
    late.received[0] = (12.0, (1,))
    late.ended = 12.5
    assert len(list(stalled([late], 10.0))) == 1


def test_no_error_may_reach_a_client() -> None:
    records = [record_of(1, outcome="failed", error="no_space"), record_of(*CALM[0]), record_of(1, outcome="left")]
    assert [found.detail for found in unanswered(records)] == [
        "() received 1 events, and failed at 1.000 s with no_space: "
    ]


def test_leftovers_and_what_nobody_handled_are_violations_of_the_run() -> None:
    fault = InjectedFault(planned=PlannedFault(1.0, "kill", "e", 2.0), began=1.0, ended=3.0, hit=("r",))
    skipped = InjectedFault(planned=PlannedFault(2.0, "cut", "e", 2.0), why="down")
    result = ChaosResult(
        seed=7, seconds=60.0, wall_seconds=1.0, faults=[skipped, fault], records=[record_of(1, 2, outcome="failed")],
        calm=CALM, left=[Leftover("e", "leases", 2)], patience=60.0, complaints=["oh"],
    )  # fmt: skip
    rules = {"every request is answered", "nothing is left behind", "no failure goes unhandled"}
    assert {found.rule for found in result.violations} == rules
    assert fault_rows(result) == [
        ["kill", "engine", "1", "1", "0", "1", "1", "1.00 s"],
        ["cut", "engine", "1", "0", "1", "0", "0", "0.00 s"],
    ]
    assert "1 faults (1 a minute)" in figures(result)[0]
    result.records[0].error, result.records[0].message = "no_space", "full"
    lines = violation_lines(result.violations, 7, "tercet chaos --seed 7")
    assert "seed 7; again: tercet chaos --seed 7" in lines[0]
    assert "    e: leases: 2" in lines
    assert "    r: () received 2 events, and failed at 2.000 s with no_space: full" in lines
    assert violation_lines([], 7, "") == ["no violations"]


def test_moves_are_told_by_reason_and_outcome() -> None:
    stage = Stage(0, 100, 5_000_000, 0.1, "host")
    moves = [
        MoveRecord(1, "a", "p", "d", "drain", 0.0, 100, "moved", (stage,), 2, 0.05),
        MoveRecord(2, "b", "p", "d", "drain", 0.0, 100, "moved", (stage, stage), 1, 0.15),
        MoveRecord(3, "c", "p", "d", "drain", 0.0, 100, "moved"),
        MoveRecord(4, "d", "p", "d", "chaos", 0.0, 100, "ended"),
    ]
    result = ChaosResult(
        seed=7, seconds=60.0, wall_seconds=1.0, faults=[], records=[], calm=CALM, patience=60.0, moves=moves,
        left=[Leftover("d", ORPHANS, 2), Leftover("p", ORPHANS, 1), Leftover("p", "leases", 4)],
    )  # fmt: skip
    assert move_rows(result) == [
        ["chaos", "ended", "1", "0", "0", "-", "-"],
        ["drain", "moved", "3", "15", "3", "100 ms", "150 ms"],
    ]
    assert result.orphans == 3
    assert figures(result)[-2].startswith("3 of 4 moves succeeded, 3 orphan generations, ")


@pytest.mark.parametrize(("seq_id", "is_his"), [("s-1", True), ("s-1.2", True), ("s-11", False), ("x", False)])
def test_a_sequence_is_owned_under_the_ids_that_it_had_since(seq_id: str, is_his: bool) -> None:
    assert is_owned(SequenceReport(seq_id, 10, 1, True, 1.0), ["s-1", "s-2"]) is is_his


FLEET = SimulatedFleet(prefill=3, decode=5)
LOAD = msgspec.structs.replace(SIMULATED_LOAD, rate=10.0, questions=16, longest_answer=60)


def run(seed: int, minutes: float, kinds: tuple[FaultKind, ...], per_minute: float = 300) -> ChaosResult:
    return run_simulated(FLEET, plan_faults(seed, FLEET.shape(), minutes, per_minute, kinds), LOAD, patience=60.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_nobody_loses_anything(seed: int) -> None:
    result = run(seed, 0.25, FLEET.shape().kinds)
    assert [str(found) for found in result.violations] == []
    assert len(result.records) > 80
    assert {fault.planned.kind for fault in result.faults if fault.began is not None} == set(FLEET.shape().kinds)
    assert sum(len(fault.hit) for fault in result.faults) > 5
    assert result.orphans == 0
    assert {move.reason for move in result.moves} >= {"chaos", "drain"}
    assert any(move.outcome == "moved" for move in result.moves)
    assert not any(move.outcome == "under_way" for move in result.moves)


@pytest.mark.slow
def test_a_sequence_that_nobody_owns_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it has been seen that there is none before the load, an engine has one."""
    reports, seen = SimEngine.reports, list[str]()

    def with_one_more(engine: SimEngine) -> list[SequenceReport]:
        seen.append(engine.name)
        more = (
            [SequenceReport("r1.1", 10, 1, True, 1.0)]
            if engine.name == "decode-0" and len(seen) > len(FLEET.roles) * REST_SECONDS
            else []
        )
        return [*reports(engine), *more]

    monkeypatch.setattr(SimEngine, "reports", with_one_more)
    result = run_simulated(FLEET, FaultSchedule(1, 2.0, ()), LOAD, patience=60.0)
    assert result.orphans == 1
    assert [str(found) for found in result.violations] == ["nothing is left behind: decode-0: orphan generations: 1"]


@pytest.mark.slow
def test_the_same_seed_is_the_same_run_to_the_last_token() -> None:
    first, again = (run(3, 0.1, ("kill", "stop", "cut")) for _ in range(2))
    assert first.records == again.records
    assert first.faults == again.faults


@pytest.mark.slow
def test_without_faults_nothing_is_found_and_with_little_patience_silence_is() -> None:
    calm = run_simulated(FLEET, FaultSchedule(1, 5.0, ()), LOAD, patience=60.0)
    assert [str(found) for found in calm.violations] == []
    stop = FaultSchedule(1, 5.0, tuple(PlannedFault(2.0, "stop", name, 3.0, "engine") for name in FLEET.roles))
    found = run_simulated(FLEET, stop, LOAD, patience=2.0).violations
    assert {each.rule for each in found} == {"no client waits longer than 2 s"}


@pytest.mark.slow
def test_an_answer_that_is_not_the_calm_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the calm questions every stream gets one wrong token on its way."""
    right = TokenDelta.to_output

    def wrong(delta: TokenDelta) -> Output:
        output = right(delta)
        if delta.position == 4 and delta.number > LOAD.questions and output.token_ids:
            return msgspec.structs.replace(output, token_ids=(output.token_ids[0] + 1, *output.token_ids[1:]))
        return output

    monkeypatch.setattr(TokenDelta, "to_output", wrong)
    result = run_simulated(FLEET, FaultSchedule(1, 5.0, ()), LOAD, patience=60.0)
    assert {found.rule for found in result.violations} == {"answers equal those without faults"}
    assert len(result.violations) > 10


SHOW = "import time; print(time.time(), time.monotonic())"


@pytest.mark.skipif(not can_be_built(), reason="no C compiler")
def test_the_wall_clock_steps_and_the_monotonic_one_does_not(tmp_path: Path) -> None:
    with WrongClock(build(tmp_path), tmp_path / "offset") as clock:
        for step in (0.0, -3600.0, 7200.0):
            clock.step(step)
            command = [sys.executable, "-c", SHOW]
            told = subprocess.run(command, env={**os.environ, **clock.env}, capture_output=True, check=True).stdout
            wall, monotonic = map(float, told.split())
            assert abs(wall - time.time() - step) < 100
            assert abs(monotonic - time.monotonic()) < 100
