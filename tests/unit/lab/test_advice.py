"""The advised fleet, against a search of all fleets."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tercet.cli.app import app
from tercet.protocol import BadRequest
from tercet_lab.advice import ARGS, SHARED, SPLIT, smallest

# Type checkers look for it in the folder of ``tercet`` only; an installation has both in one.
lab: Any = import_module("tercet.lab")
MOST = 5
SLO = lab.Slo(ttft=0.6, tpot=0.02)
LOADS = {
    "long prompts": (4.0, 3000, 20), "long answers": (12.0, 150, 300), "both": (5.0, 1200, 120),
    "light": (1.0, 300, 30),
}  # fmt: skip


def trace(folder: Path, rate: float, prompt: int, answer: int, requests: int = 150) -> Path:
    """A trace in Mooncake's form, with lengths that vary and no shared blocks."""
    lines = [
        {"timestamp": int(1000 * number / rate), "input_length": prompt // 2 + prompt * (number * 7 % 11) // 11,
         "output_length": answer // 2 + answer * (number * 5 % 13) // 13,
         "hash_ids": [number * 1000 + block for block in range(1 + prompt * 2 // 512)]}
        for number in range(requests)
    ]  # fmt: skip
    for line in lines:
        line["hash_ids"] = line["hash_ids"][: -(-line["input_length"] // 512)]  # type: ignore[index, operator]
    path = folder / "trace.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


@given(st.integers(1, 30), st.integers(0, 40), st.none() | st.integers(-5, 60))
def test_the_smallest_number_is_found_with_few_probes(answer: int, spread: int, first: int | None) -> None:
    most, probes = 30, list[int]()

    def is_enough(number: int) -> bool:
        probes.append(number)
        return number >= answer + spread

    wanted = answer + spread
    assert smallest(1, most, is_enough, first) == (wanted if wanted <= most else None)
    assert len(probes) == len(set(probes)) <= 9


@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS, ids=str)
def test_the_advice_is_within_5_percent_of_the_best_of_all_fleets(load: str, tmp_path: Path) -> None:
    work = lab.Trace(trace(tmp_path, *LOADS[load]))
    advice = lab.advise(work, SLO, most=MOST)
    fleets = [(SHARED, f"both={number}") for number in range(1, MOST + 1)]
    fleets += [
        (SPLIT, f"prefill={prefill},decode={total - prefill}")
        for total in range(2, MOST + 1)
        for prefill in range(1, total)
    ]
    found = dict[tuple[str, str], float]()
    for program, fleet in fleets:
        run = lab.simulate(program, fleet, work, args=ARGS[program], slo=SLO)
        engines = sum(group.count for group in lab.Fleet(fleet).spec.engines)
        if (run.attainment or 0.0) >= advice.attainment:
            found[program, fleet] = (run.attainment or 0.0) / engines
    assert advice.is_enough == bool(found)
    if found:
        mine = found[advice.best.program, advice.best.fleet]
        assert mine >= 0.95 * max(found.values())
    assert advice.best in advice.trials


def test_an_easy_load_needs_one_engine_and_an_impossible_one_is_said_to_be(tmp_path: Path) -> None:
    path = trace(tmp_path, 0.5, 200, 10, 20)
    easy = lab.advise(lab.Trace(path), lab.Slo(ttft=5.0), most=4)
    assert (easy.best.engines, easy.is_enough) == (1, True)
    assert easy.best.up.startswith("tercet up --program data_parallel")
    never = lab.advise(lab.Trace(path), lab.Slo(ttft=1e-6), most=2)
    assert not never.is_enough


@pytest.mark.parametrize(
    ("changes", "param"), [({"attainment": 0.0}, "attainment"), ({"most": 0}, "most"), ({"slo": lab.Slo()}, "slo")]
)
def test_what_cannot_be_asked(changes: dict[str, object], param: str, tmp_path: Path) -> None:
    given: dict[str, object] = {"slo": SLO, **changes}
    with pytest.raises(BadRequest) as refused:
        lab.advise(lab.Trace(trace(tmp_path, 1.0, 100, 5, 3)), **given)  # type: ignore[arg-type]
    assert refused.value.param == param


def test_the_command(tmp_path: Path) -> None:
    path = trace(tmp_path, 0.5, 200, 10, 20)
    words = ["advise", "--trace", str(path), "--slo", "ttft:5000", "--max-engines", "2"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "start it:  tercet up --program data_parallel" in done.output
    assert CliRunner().invoke(app, [*words[:3], "--slo", "ttft:0.001", "--max-engines", "1"]).exit_code == 1
    for wrong in (["advise", "--trace", "none", "--slo", "ttft:5"], [*words[:3], "--slo", "speed:5"]):
        refused = CliRunner().invoke(app, wrong).exception
        assert isinstance(refused, BadRequest)
        assert refused.exit_code == 2
