"""Short seeded runs of the simulated arena."""

from __future__ import annotations

import msgspec
import pytest

from tercet.protocol import Output, SequenceReport
from tercet.wire.streams.wire_format import TokenDelta
from tercet_checks.chaos.chaos_report import ChaosResult, FaultKind, FaultSchedule, PlannedFault, plan_faults
from tercet_checks.chaos.simulated_arena import REST_SECONDS, SIMULATED_LOAD, SimulatedFleet, run_simulated
from tercet_lab.sim import SimEngine

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
