"""Reports of engines: rows that come and go, and knowledge that grows old."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tercet.decisions.scheduling import Scheduling
from tercet.fleet import EngineFleet, FleetView, Member, Trace
from tercet.fleet.engine_fleet import EngineCollector
from tercet.fleet.knowledge import COLUMNS, LoadTable
from tercet.fleet.prefix_index import LEAST_PICKS, NEAR, PrefixHits
from tercet.logs import EVENTS, FIELDS
from tercet.programs import load_program, outputs_of
from tercet.protocol import Engine, EngineLoad, Request
from tests.clock import Clock
from tests.unit.decisions.scheduling.builders import loaded, request_of
from tests.unit.fakes import FakeEngine


def busy(waiting: int = 1) -> EngineLoad:
    return EngineLoad(waiting=waiting, running=2, kv_usage=0.5, tokens=300, step_time=0.02, stalled_s=1.5)


def value(table: LoadTable, column: str, row: int) -> float:
    return float(table.column(column, np.array([row]))[0])


def test_a_report_is_known_until_it_is_stale_and_its_age_beyond_that() -> None:
    clock = Clock(50.0)
    table = LoadTable(clock, stale_after=2.0)
    row = table.add("a")
    assert all(math.isnan(value(table, name, row)) for name in ("waiting", "kv_usage", "age"))
    table.report("a", busy())
    assert [value(table, name, row) for name in COLUMNS] == [1, 2, 300, 0.5, 0.02]
    assert table.last("a") == (busy(), 0)
    clock.now += 2
    assert value(table, "waiting", row) == 1
    clock.now += 0.01
    assert math.isnan(value(table, "waiting", row))
    assert value(table, "age", row) == pytest.approx(2.01)
    table.report("a", busy(7))
    assert value(table, "waiting", row) == 7


def test_what_an_engine_does_not_say_is_unknown_even_if_it_said_it_before() -> None:
    table = LoadTable(Clock(50.0))
    row = table.add("a")
    table.report("a", busy())
    table.report("a", EngineLoad(waiting=0, running=0, kv_usage=0.0))
    assert math.isnan(value(table, "tokens", row))
    assert value(table, "waiting", row) == 0


def test_a_row_that_is_used_again_knows_nothing() -> None:
    table = LoadTable(Clock(50.0))
    row = table.add("a")
    table.report("a", busy())
    assert table.remove("a") == row
    table.report("a", busy())  # late: it is gone
    assert table.add("b") == row
    assert math.isnan(value(table, "waiting", row))
    assert table.row("a") is None


def test_rows_stay_through_growth() -> None:
    table = LoadTable(Clock(50.0))
    rows = {f"e{n}": table.add(f"e{n}") for n in range(100)}
    assert len(set(rows.values())) == 100
    assert max(rows.values()) < table.size
    for n in range(100):
        table.report(f"e{n}", busy(n))
    table.add("another")
    assert table.column("waiting", np.array(list(rows.values()))).tolist() == list(range(100))
    assert len(set(table.keys(np.array(list(rows.values()))).tolist())) == 100


def test_the_last_report_stays_to_be_looked_at_with_its_age() -> None:
    clock = Clock(50.0)
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


# Reports of engines on ``/metrics``.


def test_each_engine_that_has_reported_has_its_load_and_the_reports_age() -> None:
    now = [10.0]
    members = [Member(name, f"http://{name}", "both", cast(Engine, None)) for name in ("a", "b")]
    fleet = EngineFleet(members, clock=lambda: now[0])
    registry = CollectorRegistry()
    registry.register(EngineCollector(fleet))
    said = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    assert said == ['tercet_engine_up{engine="a"} 1.0', 'tercet_engine_up{engine="b"} 1.0']
    fleet.member("b").reachable = False
    fleet.report("a", EngineLoad(waiting=3, running=2, kv_usage=0.5, step_time=0.02))
    now[0] += 7.5
    text = generate_latest(registry).decode()
    assert 'tercet_engine_report_age_seconds{engine="a"} 7.5' in text
    assert 'tercet_engine_waiting{engine="a"} 3.0' in text
    assert 'tercet_engine_step_seconds{engine="a"} 0.02' in text
    assert 'tercet_engine_tokens{engine="a"}' not in text, "what was not said is not there"
    assert [line for line in text.splitlines() if 'engine="b"' in line] == ['tercet_engine_up{engine="b"} 0.0']
    fleet.member("a").reachable = False
    text = generate_latest(registry).decode()
    assert [line for line in text.splitlines() if 'engine="a"' in line] == ['tercet_engine_up{engine="a"} 0.0']
    fleet.remove("a")
    assert 'engine="a"' not in generate_latest(registry).decode()


# Predicted and found prefix tokens: in events of the trace, and one line of the log when an engine drifts.


Lines = Callable[[], list[tuple[str, str]]]
FILE = """
plugins:
- {type: prefix-cache-scorer, parameters: {blockSize: 4}}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: prefix-cache-scorer}]
"""
LONG = 10 * NEAR


@pytest.fixture
def plan(tmp_path: Path) -> Scheduling:
    return loaded(tmp_path, FILE)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level("INFO", "tercet")

    def told() -> list[tuple[str, str]]:
        fields = [getattr(record, FIELDS) for record in caplog.records if record.name == EVENTS]
        return [(each["event"], each["engine"]) for each in fields]

    return told


def prompt(name: str) -> Request:
    return request_of(*range(32), seq_id=name)


async def traced(fleet: EngineFleet, name: str, program: str = "disaggregated", pick: str = "default") -> Trace:
    trace = Trace()
    run = load_program(program, {"pick": pick})
    async for _ in outputs_of(run(prompt(name), FleetView(fleet, trace))):
        pass
    return trace


def compared(trace: Trace) -> list[tuple[str, str, int | None, int]]:
    return [(event.verb, event.engine, event.predicted, event.cached) for event in trace.events]


async def test_the_first_event_of_each_pick_has_what_was_predicted_and_what_was_found(plan: Scheduling) -> None:
    prefill, decode = FakeEngine("p"), FakeEngine("d")
    members = [Member("p", "", "prefill", prefill), Member("d", "", "decode", decode)]
    fleet = EngineFleet(members, scheduling=plan, seed=0)
    assert [each[2] for each in compared(await traced(fleet, "first"))] == [0, 0, None]
    decode.matched = 16
    assert compared(await traced(fleet, "second")) == [("prep_recv", "d", 32, 16), ("start_generate", "d", None, 0)]


async def test_a_pick_that_looks_at_no_cache_predicts_nothing(plan: Scheduling) -> None:
    fleet = EngineFleet([Member("a", "", "both", FakeEngine("a"))], scheduling=plan)
    trace = await traced(fleet, "s", "data_parallel", "round_robin")
    assert [each[2] for each in compared(trace)] == [None] * len(trace.events)


async def test_a_prediction_ends_where_the_call_ends(plan: Scheduling) -> None:
    engine = FakeEngine("a", matched=16)
    fleet = EngineFleet([Member("a", "", "both", engine)], scheduling=plan)
    trace = Trace()
    for name in ("first", "second"):
        with FleetView(fleet, trace).pick(by="default", request=prompt(name)) as picked:
            async with picked.prep_recv(prompt(name), 16):
                pass
    assert [each[2:] for each in compared(trace)] == [(0, 16), (16, 16)]


def test_a_drift_is_one_line_and_its_end_another(lines: Lines) -> None:
    hits = PrefixHits()
    for _ in range(LEAST_PICKS - 1):
        hits.found("a", LONG, 0)
    assert lines() == [], "few picks say nothing"
    for _ in range(100):
        hits.found("a", LONG, 0)
        hits.found("b", LONG, LONG)
    assert lines() == [("prefix_drift", "a")]
    assert hits.drifting == ["a"]
    for _ in range(1000):
        hits.found("a", LONG, LONG)
    assert lines() == [("prefix_drift", "a"), ("prefix_agrees", "a")]
    assert hits.drifting == []


@pytest.mark.parametrize(
    ("predicted", "cached"), [(NEAR, 0), (LONG, LONG - NEAR), (0, LONG), (LONG, 2 * LONG), (LONG, LONG)]
)
def test_blocks_sizes_and_more_than_was_predicted_are_no_drift(lines: Lines, predicted: int, cached: int) -> None:
    hits = PrefixHits()
    for _ in range(10 * LEAST_PICKS):
        hits.found("a", predicted, cached)
    assert lines() == []


def test_between_the_bounds_nothing_flaps(lines: Lines) -> None:
    hits = PrefixHits()
    for _ in range(200):
        hits.found("a", LONG, LONG // 2)
    for number in range(400):  # a fifth is missing: below the one bound, above the other
        hits.found("a", LONG, 0 if number % 5 == 0 else LONG)
    assert lines() == [("prefix_drift", "a")]


def test_of_an_engine_that_has_left_nothing_stays(lines: Lines) -> None:
    fleet = EngineFleet([Member("a", "", "both", FakeEngine("a"))])
    for _ in range(2 * LEAST_PICKS):
        fleet.hits.found("a", LONG, 0)
    assert fleet.hits.drifting == ["a"]
    fleet.remove("a")
    assert fleet.hits.drifting == []
