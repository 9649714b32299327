"""The drawing of a trace: a lane for each engine, bars in their place, and nothing that moves the terminal."""

from __future__ import annotations

from typing import Any

import pytest

from tercet.cli.trace import drawn, head_of, leases_of, steps_of


def trace(**other: Any) -> dict[str, Any]:
    events = [
        {"verb": "prep_recv", "engine": "d", "seconds": 0.1, "at": 0.1, "end": 9},
        {"verb": "remote_send", "engine": "p", "seconds": 0.4, "at": 0.2, "end": 9, "computed": 9, "to": "d"},
        {"verb": "start_generate", "engine": "d", "seconds": 0.1, "at": 0.6, "total": 0.4, "received": 9},
    ]
    failed = [
        {"verb": "remote_send", "engine": "q\x1b[2J", "seconds": 0.1, "at": 0.1, "code": "no_space", "reason": "full"}
    ]
    picks = [
        {"role": "decode", "by": "scheduled", "engine": "d", "at": 0.0, "scores": {"d": 1.5, "e": 1.0}, "candidates": 9}
    ]
    sequence = {
        "seq_id": "cmpl-1", "program": "disaggregated", "at": 0.0, "prompt_tokens": 9, "output_tokens": 4, "ttft": 0.7,
        "tpot": None, "events": events, "picks": picks, "failed": failed, "moves": [],
    }  # fmt: skip
    return {
        "request_id": "mine", "path": "/v1/completions", "model": "m", "at": 0.0, "seconds": 1.0, "outcome": "served",
        "reason": "", "waited": 0.05, "trace_id": "", "sequences": [sequence], **other,
    }  # fmt: skip


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_every_step_is_a_row_within_the_width(width: int) -> None:
    lines = [line.plain for line in drawn(trace(), width)]
    text = "\n".join(lines)
    for step in steps_of(trace()):
        assert step.name in text
    assert max(map(len, lines)) <= max(width, 70)
    assert "\x1b" not in text


def test_bars_are_where_their_steps_were() -> None:
    lines = [line.plain for line in drawn(trace(), 200)]
    offset = lines[0].index("0")
    chart = lines[0].rindex("1 s") + 3 - offset
    row = next(line for line in lines if "generate" in line)
    bar = row[offset : offset + chart]
    assert len(bar) - len(bar.lstrip()) == pytest.approx(0.6 * chart, abs=1)
    assert bar.rstrip().endswith("▒")  # tokens after the first
    assert bar.count("█") == pytest.approx(0.1 * chart, abs=2)


def test_each_step_of_a_leases_life_is_a_line() -> None:
    steps = [[0.0, "timers", "asked", "blocks for 9 tokens"], [0.25, "reservations", "reserved", "0 tokens"]]
    lease = {"lease": "0a1b2c3d", "seq_id": "cmpl-1", "at": 0.5, "engine": "d", "steps": steps}
    assert [*leases_of(trace(leases=[lease]))] == [
        "  lease 0a1b2c3d of cmpl-1 on d",
        "    500 ms  timers        asked     blocks for 9 tokens",
        "    750 ms  reservations  reserved  0 tokens",
    ]
    assert not [*leases_of(trace())]


def test_picks_have_scores_and_failures_their_reason() -> None:
    said = {(step.lane, step.name): step.says for step in steps_of(trace())}
    assert "scores d 1.5, e 1 of 9" in said["router", "pick"]
    assert said["q\x1b[2J", "remote_send"] == "no_space: full"
    assert "waited 50 ms" in said["router", "admission"]


def test_a_generation_that_goes_on_has_no_end_yet() -> None:
    found = trace(outcome="running", seconds=5.0)
    del found["sequences"][0]["events"][2]["total"]
    (step,) = (step for step in steps_of(found) if step.name == "generate")
    assert step.end == 5.0


def test_a_request_that_never_came_in_has_a_head_alone() -> None:
    found = trace(outcome="saturated", reason="the fleet is full", sequences=[], waited=0.0)
    assert list(drawn(found, 80)) == []
    assert "saturated: the fleet is full" in next(iter(head_of(found)))
