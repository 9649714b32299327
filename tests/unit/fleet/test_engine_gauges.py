"""Reports of engines on ``/metrics``."""

from __future__ import annotations

from typing import cast

from prometheus_client import CollectorRegistry, generate_latest

from tercet.fleet import EngineFleet, Member
from tercet.fleet.engine_fleet import EngineCollector
from tercet.protocol import Engine, EngineLoad


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
