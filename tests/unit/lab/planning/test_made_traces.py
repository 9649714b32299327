"""The loads of ``python -m benchmarks.planner``."""

from __future__ import annotations

import pytest
from benchmarks.planner import Shape, load_at, trace


@pytest.mark.parametrize("shape", ["flip", "day", "bursts", "tenants", "steady"])
def test_a_trace_has_the_load_that_it_is_made_of(shape: Shape) -> None:
    seconds, rate = 400.0, 10.0
    lines = list(trace(shape, seconds, rate, seed=1))
    assert lines == list(trace(shape, seconds, rate, seed=1))
    times = [line["timestamp"] / 1e3 for line in lines]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < seconds
    expected = sum(load_at(shape, at / 10, seconds, rate).rate / 10 for at in range(int(seconds * 10)))
    assert len(lines) == pytest.approx(expected, rel=0.1)
    blocks = [block for line in lines for block in line["hash_ids"]]
    assert len(blocks) == len(set(blocks))
    for line in lines[::50]:
        at = line["timestamp"] / 1e3
        assert line["input_length"] == pytest.approx(load_at(shape, at, seconds, rate).prompt, rel=1.2)
