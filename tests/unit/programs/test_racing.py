"""Several engines for one request differ, and what was taken on each is given back; the manual's race of sends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tercet.fleet import EngineFleet, FleetView, Member
from tercet.programs import load_program
from tercet.protocol import BadRequest
from tercet_lab.bench.simulated.scenario import SyntheticWorkload, parse_fleet, requests_of
from tercet_lab.bench.simulated.virtual_run import PaidTime, run_requests
from tercet_lab.sim import EngineOptions, Network, SimEngine, load_profile
from tests.virtual_time import in_virtual_time

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "programs.md").read_text()
PROFILE = "llama-3.1-8b-h100-tp1"


def fleet_of(*roles: str) -> EngineFleet:
    network, profile = Network(), load_profile(PROFILE)
    engines = [SimEngine(f"{role}-{n}", profile, network, EngineOptions()) for n, role in enumerate(roles)]
    pairs = zip(roles, engines, strict=True)
    return EngineFleet([Member(each.name, f"sim://{each.name}", role, each) for role, each in pairs])  # type: ignore[arg-type]


@pytest.mark.parametrize("by", ["round_robin", "least_loaded"])
@pytest.mark.parametrize(("count", "found"), [(1, 1), (2, 2), (3, 3), (9, 3)])
@in_virtual_time
async def test_engines_differ_and_are_fewer_if_fewer_exist(by: str, count: int, found: int) -> None:
    fleet = fleet_of("both", "both", "both")
    for _ in range(3):
        with FleetView(fleet).pick_several(count, by=by) as engines:
            assert len({engine.name for engine in engines}) == len(engines) == found
            assert [member.in_flight for member in fleet.members].count(1) == found
        assert not any(member.in_flight for member in fleet.members)
    with pytest.raises(BadRequest, match="count: is 0"), FleetView(fleet).pick_several(0):
        pass


@in_virtual_time
async def test_roles_partners_and_failures_count() -> None:
    fleet = fleet_of("prefill", "decode", "prefill")
    with (
        FleetView(fleet).pick("decode") as decode,
        FleetView(fleet).pick_several(3, "prefill", other_than=decode) as senders,
    ):
        assert {each.name for each in senders} == {"prefill-0", "prefill-2"}
    alone = fleet_of("both", "both")
    with FleetView(alone).pick() as one, FleetView(alone).pick_several(2, other_than=one) as others:
        assert [each.name for each in others] == [name for name in ("both-0", "both-1") if name != one.name]
    with pytest.raises(RuntimeError, match="mine"), FleetView(alone).pick_several(2):
        raise RuntimeError("mine")
    assert not any(member.in_flight for member in (*fleet.members, *alone.members))


def raced(tmp_path: Path) -> Any:
    code = re.search(r"```python\n(import asyncio.*?async def raced.*?)```", PAGE, re.DOTALL)
    assert code is not None
    (tmp_path / "mine.py").write_text(code[1])
    return load_program(f"{tmp_path / 'mine.py'}:raced")


@pytest.mark.parametrize("freezes", [False, True])
def test_the_race_of_the_manual_is_won_by_the_faster_sender_and_leaves_nothing(freezes: bool, tmp_path: Path) -> None:
    work = SyntheticWorkload(rate=3.0, requests=60, input_mean=3000, input_dev=1000, output_mean=20)
    engines, links = list[SimEngine](), list[Any]()
    faults = "faults:\n  - {engine: prefill-1, at: 2, down: 4, kind: freeze}\n" if freezes else ""
    (tmp_path / "fleet.yaml").write_text(
        "engines:\n  - {role: prefill, count: 2}\n  - {role: decode, count: 2}\n" + faults
    )
    spec = parse_fleet(str(tmp_path / "fleet.yaml"))

    async def watch(service: Any, built: Any, paid: PaidTime) -> None:
        engines.extend(built.values())
        links.append(service)

    found: dict[str, Any] = {}
    for name, program in (("alone", load_program("disaggregated")), ("raced", raced(tmp_path))):
        engines.clear()
        outcome = run_requests(program, spec, PROFILE, EngineOptions(), requests_of(work, 1), seed=1, companion=watch)
        assert not outcome.failures
        assert outcome.fallbacks == outcome.retries == 0
        found[name] = outcome
        for engine in engines:
            load = engine.load()
            assert (load.running, load.waiting) == (0, 0)
            assert engine.pool.free == engine.pool.total, "no block is pinned"
        assert not any(member.in_flight for member in links[-1].fleet.members)
    tokens = [each.counts["prefill_tokens"] for each in found.values()]
    assert tokens[1] > 1.3 * tokens[0], "prompts are computed twice, until the slower one is cancelled"
    waits = {name: np.percentile(each.requests.ttft, 99) for name, each in found.items()}
    if freezes:
        assert waits["alone"] > 2.0, "requests wait for the engine that stands still"
        assert waits["raced"] < 1.0
