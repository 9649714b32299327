"""What a keeper decides: the roster of its reports, and which actors are no longer wanted."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tercet.cluster.child_process import Process, StartFailed
from tercet.cluster.engine_command import EngineSpec
from tercet.cluster.up_config import UpConfig
from tercet.fleet.discovery import RosterEntry, read_roster, write_roster
from tercet.protocol import BadRequest, Role
from tercet_ray import ray_fleet
from tercet_ray.fleet_keeper import OwnerReport, Resources, WantedEngine, actor_options, merged, roster_of, unwanted
from tercet_ray.ray_fleet import Follower, wanted_fleet
from tests.longest_wait import LONGEST_WAIT_S


def wanted(name: str, role: Role = "both") -> WantedEngine:
    return WantedEngine(EngineSpec(name=name, model="m", served_model_name="m", host="", port=0), role)


def report(uid: str, state: str = "ready", node: str = "n1", port: int = 1) -> OwnerReport:
    return OwnerReport(uid, f"http://10.0.0.1:{port}", state, node, "10.0.0.1", "/log")


def test_the_roster_has_the_newest_start_of_each_engine_that_has_an_address() -> None:
    engines = [wanted("a", "prefill"), wanted("b"), wanted("c"), wanted("d"), wanted("e")]
    unplaced = OwnerReport("4", "", "starting", "n1", "10.0.0.1", "")
    reports = {
        "a": report("1.1"),
        "b": report("2.2", "starting", port=2),
        "c": report("3.1", node="n2", port=3),
        "d": unplaced,
        "other": report("9"),
    }
    roster = roster_of(engines, reports, {"n2"})
    assert roster == [
        RosterEntry("a", "http://10.0.0.1:1", "1.1", "prefill"),
        RosterEntry("b", "http://10.0.0.1:2", "2.2", withheld="starting"),
        RosterEntry("c", "http://10.0.0.1:3", "3.1", draining=True),
    ]
    assert [each.serves for each in read_roster(write_roster(roster))] == [True, False, True]


def test_the_same_reports_are_the_same_roster() -> None:
    engines, reports = [wanted("b"), wanted("a")], {"a": report("1"), "b": report("2", port=2)}
    assert write_roster(roster_of(engines, reports, ())) == write_roster(roster_of(engines[::-1], reports, ()))


def test_an_engine_of_which_nothing_is_known_stays() -> None:
    engines = [wanted("a"), wanted("b")]
    before = roster_of(engines, {"a": report("1"), "b": report("2", port=2)}, ())
    assert merged(engines, before, []) == before, "the keeper begins anew"
    after = roster_of(engines, {"a": report("3", "starting", port=3)}, ())
    assert merged(engines, before, after) == [*after, before[1]]
    assert merged(engines[:1], before, []) == before[:1], "who is not wanted any more goes"


def test_actors_of_other_fleets_are_left_alone() -> None:
    actors = ["f/keeper", "f/a", "f/b", "g/b", "f2/a", "else"]
    assert unwanted("f", [wanted("a")], actors, "f/keeper") == ["f/b"]


def test_owners_are_detached_restarted_and_not_on_the_head() -> None:
    options = actor_options("f/a", Resources(2.0, 4, 1.5), "abc")
    assert options["lifetime"] == "detached"
    assert options["max_restarts"] == -1
    assert (options["num_cpus"], options["num_gpus"], options["memory"]) == (2.0, 4, 1536 * 1024**2)
    assert options["label_selector"] == {"ray.io/node-id": "!abc"}
    assert "label_selector" not in actor_options("f/a", Resources(head=True), "abc")
    assert not {"num_gpus", "memory", "label_selector"} & actor_options("f/a", Resources(), "").keys()


def test_engines_ask_for_what_their_ranks_need() -> None:
    config = UpConfig(on="ray:10.0.0.1:6379", engine_gpus=1, engine_args=("-tp", "4"), max_instances=3, secret="s")
    fleet = wanted_fleet(config, "/models/m", 8000)
    assert (fleet.name, fleet.address) == ("tercet-8000", "10.0.0.1:6379")
    assert fleet.resources == Resources(4.0, 4)
    assert [each.spec.name for each in fleet.engines] == ["prefill-0", "decode-0", "decode-1"]
    assert all(each.environment["TERCET_SECRET"] == "s" for each in fleet.engines)
    assert UpConfig(on="ray").ray_address == "auto"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"on": "slurm"}, "must be ray or ray:HOST:PORT"),
        ({"on": "ray:"}, "must be ray or ray:HOST:PORT"),
        ({"on": "ray:host"}, "must be ray or ray:HOST:PORT"),
        ({"engine_gpus": 1}, "is required by"),
        ({"fleet_name": "f"}, "is required by"),
        ({"on": "ray", "engine_args": ("-dp", "2")}, "one group"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        UpConfig(**settings)  # pyright: ignore[reportArgumentType]


# The process that writes the roster of a fleet on Ray is kept running, without Ray.


pytestmark = pytest.mark.processes


async def test_a_follower_that_the_system_does_not_start_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_fleet, "AGAIN_SECONDS", 0.01)
    follower = Follower(tmp_path / "fleet", tmp_path / "roster.json", tmp_path)
    follower.process = Process("ray", [sys.executable, "-c", "raise SystemExit(3)"], {}, tmp_path / "ray.log")
    start, refused, said = Process.start, iter((True, True)), list[str]()
    await follower.process.start()

    async def full(process: Process) -> None:
        if next(refused, False):
            raise StartFailed("ray cannot be started: No space left on device")
        await start(process)

    monkeypatch.setattr(Process, "start", full)
    keeping = asyncio.create_task(follower.keep(lambda name, state: said.append(f"{name}: {state}")))
    async with asyncio.timeout(LONGEST_WAIT_S):
        while len(said) < 4:
            assert not keeping.done()
            await asyncio.sleep(0.01)
    keeping.cancel()
    await asyncio.wait({keeping})
    await follower.process.stop()
    ended, cannot = "ended with exit code 3", "cannot be started: No space left on device"
    rest = "and is restarted; engines continue to run"
    assert said[:4] == [f"ray: the follower {how} {rest}" for how in (ended, cannot, cannot, ended)]
