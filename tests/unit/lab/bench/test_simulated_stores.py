"""Fleets with a store in virtual time: hits against an LRU of the same size, and the time that they save."""

from __future__ import annotations

import json
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path

import pytest

from tercet.protocol import BadRequest
from tercet_lab.bench.simulated import Experiment, Fleet, PlannedWorkload, Run, parse_fleet

from .test_replay import BLOCK, trace

REQUESTS, ROOM = 300, 500_000
STORED = 16  # tokens of a store's block


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    trace(path, REQUESTS, most_output=50)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("\n".join(json.dumps(row | {"timestamp": 300 * at}) for at, row in enumerate(rows)))
    return path


@lru_cache(maxsize=8)
def run(path: Path, program: str, fleet: str, pick: str = "") -> Run:
    work = PlannedWorkload(workload=(f"mooncake,path={path}",), arrivals="trace")
    found = Fleet(fleet, total_blocks=4000)
    return Experiment(program=program, args={"pick": pick} if pick else {}, fleet=found, work=work).run()


def hits(found: Run) -> float:
    return float(found.requests["cached_tokens"].sum() / found.requests["input_tokens"].sum())


def hits_of_an_lru(path: Path, room: int) -> float:
    """The share of prompt tokens that one cache of ``room`` tokens finds, in whole blocks of a store."""
    cache, found, total = OrderedDict[tuple[int, int], None](), 0, 0
    for line in path.read_text().splitlines():
        row = json.loads(line)
        whole = range(0, row["input_length"] // STORED * STORED, STORED)
        blocks = [(row["hash_ids"][at // BLOCK], at % BLOCK) for at in whole]
        total += row["input_length"]
        for block in blocks:
            if block not in cache:
                break
            found += STORED
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > room // STORED:
            cache.popitem(last=False)
    return found / total


@pytest.mark.slow
@pytest.mark.parametrize("room", [ROOM * 3 // 5, ROOM])
def test_a_store_finds_what_an_lru_of_its_size_finds(recorded: Path, room: int) -> None:
    found = run(recorded, "fetch", f"both=4,store={room}")
    assert not found.requests.failures
    assert hits(found) == pytest.approx(hits_of_an_lru(recorded, room), abs=0.01)


@pytest.mark.slow
def test_what_is_pulled_is_not_computed_and_saves_time(recorded: Path) -> None:
    computed = run(recorded, "data_parallel", "both=4", "least_loaded")
    pulled = run(recorded, "fetch", f"both=4,store={ROOM}")
    assert pulled.summary.ttft is not None
    assert computed.summary.ttft is not None
    assert pulled.summary.ttft.mean < 0.8 * computed.summary.ttft.mean


@pytest.mark.slow
def test_auto_pulls_from_a_store(recorded: Path) -> None:
    without, found = run(recorded, "auto", "both=4"), run(recorded, "auto", f"both=4,store={ROOM}")
    assert found.point is not None
    assert found.point.counts["store_sent_tokens"] > 0.1 * found.requests["input_tokens"].sum()
    assert found.point.counts.get("store_copies_gone", 0) <= 0.02 * REQUESTS
    assert hits(found) > hits(without) + 0.05
    assert found.summary.ttft is not None
    assert without.summary.ttft is not None
    assert found.summary.ttft.mean < without.summary.ttft.mean


@pytest.mark.slow
def test_a_disk_adds_what_memory_cannot_hold(recorded: Path) -> None:
    small = f"both=4,store={ROOM // 10}"
    assert hits(run(recorded, "fetch", f"{small}+{ROOM}")) > hits(run(recorded, "fetch", small)) + 0.05


@pytest.mark.parametrize("kind", ["die", "freeze"])
def test_a_store_that_stops_costs_no_request(recorded: Path, kind: str) -> None:
    work = PlannedWorkload(workload=(f"mooncake,path={recorded}",), arrivals="trace", requests=150)
    fleet = Fleet("both=4", store="1M", total_blocks=4000).fault("store-0", 20, 10, kind)  # type: ignore[arg-type]
    found = Experiment(program="fetch", fleet=fleet, work=work).run()
    assert not found.requests.failures
    assert found.point is not None
    assert found.point.counts["store_sent_tokens"] > 0


@pytest.mark.slow
def test_sessions_of_agents_find_more_than_nine_tenths() -> None:
    sessions = "sessions,turns=20,system_len=3000,input_len=300,output_len=60,think_time=20"
    work = PlannedWorkload(workload=(sessions,), rate=4, requests=400)
    fleet = Fleet(both=4, store="2M", total_blocks=2000)
    found = Experiment(program="fetch", fleet=fleet, work=work).run()
    assert hits(found) > 0.9
    alone = Experiment(program="data_parallel", fleet=Fleet(both=4, total_blocks=2000), work=work).run()
    assert hits(alone) < hits(found)


def test_the_text_of_a_fleet_with_a_store() -> None:
    spec = parse_fleet("2P1D,store=1.5M+2G")
    assert [group.count for group in spec.engines] == [2, 1]
    assert [(store.tokens, store.disk_tokens) for store in spec.stores] == [(1_500_000, 2_000_000_000)]
    assert str(Fleet(both=2, store=4096)) == "both=2,store=4096"
    with pytest.raises(BadRequest, match="8M"):
        parse_fleet("both=2,store=much")
    with pytest.raises(BadRequest, match="at least one engine"):
        parse_fleet("store=8M")
    with pytest.raises(BadRequest, match="store-1"):
        Fleet("both=2,store=8M").fault("store-1", 1)
