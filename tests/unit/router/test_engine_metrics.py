"""Reports of engines on ``/metrics``."""

from __future__ import annotations

from typing import cast

from prometheus_client import CollectorRegistry, generate_latest

from tercet.fleet import EngineFleet, Member
from tercet.protocol import Engine, EngineLoad
from tercet.router.metrics import EngineCollector


def test_each_engine_that_has_reported_has_its_load_and_the_reports_age() -> None:
    now = [10.0]
    members = [Member(name, f"http://{name}", "both", cast(Engine, None)) for name in ("a", "b")]
    fleet = EngineFleet(members, clock=lambda: now[0])
    registry = CollectorRegistry()
    registry.register(EngineCollector(fleet))
    assert b'engine="a"' not in generate_latest(registry)
    fleet.report("a", EngineLoad(waiting=3, running=2, kv_usage=0.5, step_time=0.02))
    now[0] += 7.5
    text = generate_latest(registry).decode()
    assert 'tercet_engine_report_age_seconds{engine="a"} 7.5' in text
    assert 'tercet_engine_waiting{engine="a"} 3.0' in text
    assert 'tercet_engine_step_time{engine="a"} 0.02' in text
    assert 'tercet_engine_tokens{engine="a"}' not in text, "what was not said is not there"
    assert 'engine="b"' not in text
    fleet.remove("a")
    assert 'engine="a"' not in generate_latest(registry).decode()
