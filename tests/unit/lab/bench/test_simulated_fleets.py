"""Fleets in virtual time: with a store, with roles that follow the load, with hardly any KV, on shared hosts, and with
a program that raises.
"""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from functools import lru_cache
from itertools import count
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from tercet.programs import data_parallel, load_program
from tercet.programs.patterns import Answer
from tercet.protocol import BadRequest, ProgramFailed, Request
from tercet.protocol import Fleet as FleetOfEngines
from tercet.settings import RescheduleSettings
from tercet.settings.fleet_settings import Objectives
from tercet_lab.bench.simulated import (
    Experiment,
    Fleet,
    MovingSettings,
    PlannedWorkload,
    Run,
    SyntheticWorkload,
    parse_fleet,
)
from tercet_lab.bench.simulated.scenario import EngineGroup, FleetSpec
from tercet_lab.bench.simulated.simulation import SimulatedPoint
from tercet_lab.bench.simulated.virtual_run import run_once
from tercet_lab.sim import EngineOptions, load_profile
from tercet_lab.sim.step_times import HostSharing
from tests.long_runs import FULL

from .test_simulated_workloads import BLOCK, trace

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


OBJECTIVES = Objectives(ttft=1.0, tpot=0.025)
# More than two engines can prefill: their line grows until others help.
LONG_PROMPTS = SyntheticWorkload(rate=40.0, requests=240, input_mean=4000, output_mean=8)


def simulated(roles: str, workload: SyntheticWorkload = LONG_PROMPTS, fleet: str = "2P4D") -> SimulatedPoint:
    moving = MovingSettings(objectives=OBJECTIVES, roles=roles)  # type: ignore[arg-type]
    return Experiment(
        program="disaggregated", fleet=Fleet(fleet, profile="llama-3.1-8b-h100-tp1"), work=workload, moves=moving
    ).point(workload.rate)


@pytest.mark.slow
def test_engines_go_where_the_line_is() -> None:
    fixed, auto = simulated("fixed"), simulated("auto")
    assert fixed.flips == ()
    assert {flip.role for flip in auto.flips} == {"prefill"}
    assert 1 <= len(auto.flips) <= 2
    assert auto.summary.failed == 0
    assert auto.summary.completed == LONG_PROMPTS.requests
    assert fixed.summary.attainment is not None
    assert auto.summary.attainment is not None
    assert auto.summary.attainment > fixed.summary.attainment
    metrics = auto.metrics()
    assert metrics["role_flips"] == len(auto.flips)
    assert metrics["engines_flipped"] == sum(len(flip.engines) for flip in auto.flips)


@pytest.mark.slow
def test_an_overload_of_the_first_seconds_is_acted_on_at_once() -> None:
    """One engine computes a third of what comes; the split that bears it is taken at one go, as by the planner."""
    overload = SyntheticWorkload(rate=45.0, requests=300, input_mean=3000, output_mean=80)
    first, *later = simulated("auto", overload, "1P5D").flips
    assert first.at <= 3.0
    assert first.role == "prefill"
    assert len(first.engines) >= 3
    assert later == []


@pytest.mark.slow
def test_a_load_that_all_engines_bear_changes_no_role() -> None:
    light = SyntheticWorkload(rate=4.0, requests=100, input_mean=500, output_mean=50)
    found = simulated("auto", light)
    assert found.flips == ()
    assert found.summary.attainment == 1.0
    assert "role_flips" not in found.metrics()


def test_roles_that_follow_need_objectives() -> None:
    with pytest.raises(BadRequest, match="--objective-ttft"):
        MovingSettings(roles="auto")


@pytest.mark.slow
def test_objectives_are_an_slo() -> None:
    """The same rule by either name."""
    light = SyntheticWorkload(rate=4.0, requests=20, input_mean=500, output_mean=5)
    found = simulated("fixed", light)
    assert found.summary.request_goodput == pytest.approx(found.summary.request_throughput)
    assert json.loads(json.dumps(found.metrics()))["attainment"] == 1.0


CASES = 400 if FULL else 40
PROFILE = "llama-3.1-8b-h100-tp1"
FLEETS = ("1P1D", "1P2D", "2P1D", "both=1", "both=2", "both=3", "prefill=1,decode=1,both=1")
PROGRAMS: tuple[tuple[str, dict[str, str]], ...] = (
    ("data_parallel", {}),
    ("disaggregated", {}),
    ("balanced", {"balance_ratio": "0.3"}),
    ("balanced", {"balance_ratio": "0.9"}),
    ("conditional", {}),
    ("auto", {}),
)


@pytest.mark.parametrize("seed", range(CASES))
def test_a_small_fleet_with_scarce_kv_serves_every_request(seed: int) -> None:
    choice = random.Random(seed)
    name, arguments = choice.choice(PROGRAMS)
    blocks = choice.choice([34, 48, 60, 100])
    longest = blocks * 8
    requests = choice.randint(2, 30)
    workload = SyntheticWorkload(
        rate=choice.choice([5.0, 50.0, 2000.0]),
        requests=requests,
        input_mean=choice.randint(16, longest // 2),
        output_mean=choice.randint(1, longest // 2),
        warm_up=0,
    )
    options = EngineOptions(
        total_blocks=blocks,
        max_num_seqs=choice.choice([2, 8, 256]),
        max_num_batched_tokens=choice.choice([256, 8192]),
        schedule=choice.choice(["chunked", "prefill_first"]),
        max_lease_share=choice.choice([0.5, 0.8, 1.0]),
        prefix_caching=choice.random() < 0.8,
    )
    policies = choice.choice([(), ("neutral_load",)])
    moving = MovingSettings(reschedule=RescheduleSettings(policies=policies))
    outcome = run_once(
        load_program(name, arguments),
        parse_fleet(choice.choice(FLEETS)),
        PROFILE,
        options,
        workload,
        seed,
        None,
        moving,
    )
    assert len(outcome.requests["ended"]) == requests
    assert not outcome.failures, outcome.first_error


KNOWN = "llama-3.1-8b-h100-tp1"


@pytest.fixture
def shared(tmp_path: Path) -> str:
    """A profile's file in which each computing neighbour makes steps half as long again."""
    sharing = HostSharing(
        prefill_beside_prefill=1.5, prefill_beside_decode=1.5, decode_beside_prefill=1.5, decode_beside_decode=1.5
    )
    file = tmp_path / "shared.json"
    file.write_bytes(msgspec.json.encode(replace(load_profile(KNOWN), sharing=sharing)))
    return str(file)


def simulation(fleet: str, profile: str, program: str = "data_parallel") -> Experiment:
    workload = SyntheticWorkload(rate=1, requests=80, warm_up=10, input_mean=512, output_mean=64)
    return Experiment(program=program, fleet=Fleet(fleet, profile=profile), work=workload, seed=1)


def hosts_of(fleet: str) -> list[tuple[str, int, str | None]]:
    return [(group.role, group.count, group.host) for group in parse_fleet(fleet).engines]


def test_hosts_on_a_line_and_in_a_file(tmp_path: Path) -> None:
    assert hosts_of("1P2D@here") == [("prefill", 1, "here"), ("decode", 2, "here")]
    assert hosts_of("both=2@a,both=2@b,decode=1") == [("both", 2, "a"), ("both", 2, "b"), ("decode", 1, None)]
    file = tmp_path / "fleet.yaml"
    file.write_text("engines: [{role: both, count: 2, host: a}, {role: both}]")
    assert hosts_of(str(file)) == [("both", 2, "a"), ("both", 1, None)]


@pytest.mark.parametrize("given", ["both=2@", "1P1D@", "both=@a", "both@a=2", "1P1D@a@"])
def test_hosts_without_a_name_are_refused(given: str) -> None:
    with pytest.raises(BadRequest, match="fleet: ") as refused:
        parse_fleet(given)
    assert refused.value.param == "fleet"


@pytest.mark.slow
@pytest.mark.parametrize("program", ["data_parallel", "disaggregated", "balanced"])
def test_engines_of_one_host_are_slower_and_repeat_to_the_byte(shared: str, program: str) -> None:
    own = simulation("1P1D", shared, program).point(8).summary
    one = simulation("1P1D@here", shared, program)
    beside = one.point(8).summary
    assert (beside.completed, beside.failed) == (70, 0)
    assert own.e2el is not None
    assert beside.e2el is not None
    assert 1.05 * own.e2el.mean < beside.e2el.mean < 2 * own.e2el.mean
    assert one.report([8.0], "a").to_json() == one.report([8.0], "a").to_json()


def test_hosts_with_one_engine_each_change_nothing(shared: str) -> None:
    apart, alone = simulation("prefill=1@a,decode=1@b", shared).point(4), simulation("1P1D", shared).point(4)
    assert apart.summary.e2el is not None
    assert alone.summary.e2el is not None
    assert apart.summary.e2el.mean == pytest.approx(alone.summary.e2el.mean)
    # What was measured of shared hosts does not matter to engines that have none.
    assert simulation("1P1D", KNOWN).point(4).summary == alone.summary


def test_a_profile_that_says_nothing_of_shared_hosts_is_refused() -> None:
    with pytest.raises(BadRequest, match=f"host: profile {KNOWN} has no data on"):
        simulation("both=2@here", KNOWN).point(4)


def test_a_routers_time_comes_before_the_programs(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    file.write_bytes(msgspec.json.encode(replace(load_profile(KNOWN), router=0.25)))
    without, with_router = simulation("1P1D", KNOWN).point(1).summary, simulation("1P1D", str(file)).point(1).summary
    pairs = (
        (without.ttft, with_router.ttft, 0.25),
        (without.e2el, with_router.e2el, 0.25),
        (without.tpot, with_router.tpot, 0),
    )
    for before, after, added in pairs:
        assert before is not None
        assert after is not None
        assert after.mean == pytest.approx(before.mean + added)


FLEET = FleetSpec(engines=(EngineGroup(role="both"),))
WORK = SyntheticWorkload(rate=100, requests=20, input_mean=100, output_mean=5)


@pytest.mark.parametrize("number", [0, 3, 19])
def test_the_error_of_a_program_ends_the_simulation(number: int) -> None:
    """Of its first request, of one that others run next to, and of the last one."""
    numbers = count()

    async def program(request: Request, fleet: FleetOfEngines) -> Answer:
        if next(numbers) == number:
            raise ValueError("a bug")
        async for output in data_parallel(request, fleet):
            yield output

    with pytest.raises(ProgramFailed, match=r"ValueError: a bug \(.*test_simulated_fleets\.py, line \d+\)"):
        run_once(program, FLEET, "llama-3.1-8b-h100-tp1", EngineOptions(), WORK, 0)
