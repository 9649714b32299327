"""Short seeded runs of faults and a hostile client on real processes: nobody loses anything. Fleets are their own."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tercet.cluster.up_config import UpConfig
from tercet_checks.chaos.adversary import TRICKS, plan_tricks
from tercet_checks.chaos.chaos_report import FaultSchedule, PlannedFault, figures, violation_lines
from tercet_checks.chaos.real_arena import REAL_LOAD, run_real
from tests.long_runs import in_full
from tests.small_llama import small_llama

# What the product is known to survive, one after the other; half of the time is for the engine that starts anew.
ON_VLLM = (
    PlannedFault(2.0, "cut", "decode-0", 3.0),
    PlannedFault(7.0, "stop", "prefill-0", 3.0, "core"),
    PlannedFault(12.0, "kill", "decode-0", 1.0, "worker"),
)
ON_SIMULATED = (
    PlannedFault(1.0, "cut", "decode-0", 3.0),
    PlannedFault(2.0, "kill", "decode-1", 1.0),
    PlannedFault(6.0, "stop", "prefill-0", 3.0),
    PlannedFault(8.0, "full_kv", "decode-0", 3.0),
)


@in_full("tests/unit/checks/chaos in virtual time; single faults in test_frozen, test_failures, test_bypass")
@pytest.mark.parametrize(
    "simulate", [pytest.param(None, id="vllm"), pytest.param("llama-3.1-8b-h100-tp1", id="simulated")]
)
def test_nobody_loses_anything(simulate: str | None, tmp_path: Path) -> None:
    config = UpConfig(
        prefill=1, decode=1 if simulate is None else 2, port=0, dtype="float32", simulate=simulate,
        log_dir=str(tmp_path),
    )  # fmt: skip
    faults = ON_VLLM if simulate is None else ON_SIMULATED
    load = msgspec.structs.replace(REAL_LOAD, questions=4, leaving=0.2, rate=0.5 if simulate is None else 4.0)
    tricks = plan_tricks(1, 20.0, 30.0, TRICKS)
    result = run_real(config, str(small_llama()), FaultSchedule(1, 20.0, faults), load, 60.0, print, tricks)
    print("\n".join([*figures(result), *violation_lines(result.violations, 1, "this test")]))
    assert [str(found) for found in result.violations] == []
    assert [fault.planned for fault in result.faults if fault.began is None] == []
    assert len(result.faults) == len(faults)
    assert len(result.tricks) == len(tricks)
    assert result.records
