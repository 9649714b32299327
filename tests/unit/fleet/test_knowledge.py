"""Reports of engines: rows that come and go, and knowledge that grows old."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tercet.fleet.knowledge import LoadTable
from tercet.protocol import EngineLoad


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def busy(waiting: int = 1) -> EngineLoad:
    return EngineLoad(waiting=waiting, running=2, kv_usage=0.5, tokens=300, step_time=0.02, stalled_s=1.5)


def value(table: LoadTable, column: str, row: int) -> float:
    return float(table.column(column, np.array([row]))[0])


def test_a_report_is_known_until_it_is_stale_and_its_age_beyond_that() -> None:
    clock = Clock()
    table = LoadTable(clock, stale_after=2.0)
    row = table.add("a")
    assert all(math.isnan(value(table, name, row)) for name in ("waiting", "kv_usage", "age"))
    table.report("a", busy())
    columns = [name for name in EngineLoad.__struct_fields__ if name not in ("adapters", "paused")]
    assert [value(table, name, row) for name in columns] == [1, 2, 0.5, 300, 0.02, 1.5, 0]
    clock.now += 2
    assert value(table, "waiting", row) == 1
    clock.now += 0.01
    assert math.isnan(value(table, "waiting", row))
    assert value(table, "age", row) == pytest.approx(2.01)
    table.report("a", busy(7))
    assert value(table, "waiting", row) == 7


def test_what_an_engine_does_not_say_is_unknown_even_if_it_said_it_before() -> None:
    table = LoadTable(Clock())
    row = table.add("a")
    table.report("a", busy())
    table.report("a", EngineLoad(waiting=0, running=0, kv_usage=0.0))
    assert math.isnan(value(table, "tokens", row))
    assert value(table, "waiting", row) == 0


def test_a_row_that_is_used_again_knows_nothing() -> None:
    table = LoadTable(Clock())
    row = table.add("a")
    table.report("a", busy())
    assert table.remove("a") == row
    table.report("a", busy())  # late: it is gone
    assert table.add("b") == row
    assert math.isnan(value(table, "waiting", row))
    assert table.row("a") is None


def test_rows_stay_through_growth() -> None:
    table = LoadTable(Clock())
    rows = {f"e{n}": table.add(f"e{n}") for n in range(100)}
    assert len(set(rows.values())) == 100
    assert max(rows.values()) < table.size
    for n in range(100):
        table.report(f"e{n}", busy(n))
    table.add("another")
    assert table.column("waiting", np.array(list(rows.values()))).tolist() == list(range(100))
    assert len(set(table.keys(np.array(list(rows.values()))).tolist())) == 100


def test_the_last_report_stays_to_be_looked_at_with_its_age() -> None:
    clock = Clock()
    table = LoadTable(clock, stale_after=1.0)
    assert table.last("a") is None
    table.add("a")
    assert table.last("a") is None
    table.report("a", busy())
    clock.now += 30
    assert table.last("a") == (busy(), 30.0)
    quiet = EngineLoad(waiting=0, running=0, kv_usage=0.0)
    table.report("a", quiet)
    assert table.last("a") == (quiet, 0.0)
    table.remove("a")
    assert table.last("a") is None
