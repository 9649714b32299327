"""Predicted and found prefix tokens: in events of the trace, and one line of the log when an engine drifts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tercet.decisions.scheduling import Scheduling
from tercet.fleet import EngineFleet, Member, Trace
from tercet.fleet.trace import LEAST_PICKS, NEAR, PrefixHits
from tercet.logs import EVENTS, FIELDS
from tercet.programs import load_program, outputs_of
from tercet.protocol import Request
from tests.unit.decisions.scheduling.builders import loaded, request_of
from tests.unit.fakes import FakeEngine

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
    async for _ in outputs_of(run(prompt(name), fleet.traced(trace))):
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
        with fleet.traced(trace).pick(by="default", request=prompt(name)) as picked:
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
