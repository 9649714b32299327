"""Fleets whose engines share hosts: how they are described, and what that changes in a run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from tercet.protocol import BadRequest
from tercet_lab.bench.simulated import Experiment, Fleet, SyntheticWorkload, parse_fleet
from tercet_lab.sim import load_profile
from tercet_lab.sim.step_times import HostSharing

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
