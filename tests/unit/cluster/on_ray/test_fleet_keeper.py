"""A keeper over a Ray in memory: it has an owner for each engine, whatever becomes of them, and ends what is left."""

from __future__ import annotations

import time
from types import SimpleNamespace

import msgspec
import pytest

from tercet.cluster.engine_command import EngineSpec
from tercet.fleet.discovery import RosterEntry
from tercet.protocol import Role
from tercet_ray import fleet_keeper
from tercet_ray.fleet_keeper import FleetKeeper, OwnerReport, Resources, WantedEngine, WantedFleet
from tercet_ray.follower import once_it_runs
from tests.longest_wait import wait_until

from .fake_ray import ActorDiedError, ActorUnavailableError, FakeActor, FakeRay

ROLES: dict[str, Role] = {"p": "prefill", "d": "decode"}
WANTED = WantedFleet(
    "f",
    "auto",
    tuple(
        WantedEngine(EngineSpec(name=name, model="m", served_model_name="m", host="", port=0), role)
        for name, role in ROLES.items()
    ),
    Resources(2.0),
)


class World:
    def __init__(self) -> None:
        self.starts = 0
        self.draining: set[str] = set()
        self.stored: dict[str, bytes | None] = {}
        self.ray = FakeRay(self.made)

    def made(self, actor: FakeActor) -> None:
        self.starts += 1
        number = self.starts
        report = OwnerReport(f"uid-{number}", f"http://10.0.0.{number}:1", "ready", f"node-{number}", "", "/log")
        actor.answers = {"report": lambda: msgspec.json.encode(report)}

    def keeper(self) -> FleetKeeper:
        return FleetKeeper(msgspec.json.encode(WANTED))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(fleet_keeper, "the_ray", lambda: made.ray)
    monkeypatch.setattr(fleet_keeper, "head_node", lambda _: "head")
    monkeypatch.setattr(fleet_keeper, "draining_nodes", lambda _: made.draining)
    monkeypatch.setattr(fleet_keeper, "named_actors", lambda: list(made.ray.actors))
    monkeypatch.setattr(fleet_keeper, "stored", lambda name: made.stored.get(name))
    monkeypatch.setattr(fleet_keeper, "store", lambda name, content: made.stored.update({name: content}))
    monkeypatch.setattr(fleet_keeper, "LOOK_SECONDS", 0.002)
    return made


def roster(keeper: FleetKeeper) -> dict[str, RosterEntry]:
    return {each.name: each for each in msgspec.json.decode(keeper.roster(), type=list[RosterEntry])}


def test_it_makes_an_owner_for_each_engine_and_ends_them(world: World) -> None:
    keeper = world.keeper()
    wait_until(lambda: len(roster(keeper)) == 2)
    assert {name: each.role for name, each in roster(keeper).items()} == {"p": "prefill", "d": "decode"}
    owner = world.ray.actors["f/p"]
    assert (owner.options["num_cpus"], owner.options["lifetime"]) == (2.0, "detached")
    assert owner.options["label_selector"] == {"ray.io/node-id": "!head"}
    keeper.stop()
    assert sorted(world.ray.killed) == ["f/d", "f/p"]
    assert owner.called[-1] == "stop"


def test_a_keeper_that_begins_anew_takes_the_owners_that_are_there(world: World) -> None:
    first = world.keeper()
    wait_until(lambda: len(roster(first)) == 2)
    second = world.keeper()
    wait_until(lambda: roster(second) == roster(first))
    assert world.starts == 2
    first._stopping.set()
    second.stop()
    assert not world.ray.actors


def test_an_owner_that_is_silent_or_started_again_stays_as_it_was(world: World) -> None:
    keeper = world.keeper()
    wait_until(lambda: len(roster(keeper)) == 2)
    owner, before = world.ray.actors["f/d"], roster(keeper)
    owner.failure = ActorUnavailableError("soon")
    asked = len(owner.called)
    wait_until(lambda: len(owner.called) > asked + 3)
    assert roster(keeper) == before
    owner.failure, owner.silent = None, True
    asked = len(owner.called)
    time.sleep(0.05)
    assert len(owner.called) <= asked + 1, "it is asked once, and not again before it has answered"
    assert roster(keeper) == before
    owner.silent = False
    keeper.stop()


def test_an_owner_that_is_gone_for_good_is_made_anew(world: World) -> None:
    keeper = world.keeper()
    wait_until(lambda: len(roster(keeper)) == 2)
    owner = world.ray.actors.pop("f/d")
    owner.failure = ActorDiedError("gone")
    wait_until(lambda: roster(keeper)["d"].uid == "uid-3")
    assert roster(keeper)["p"].uid == "uid-1"
    keeper.stop()


def test_machines_that_are_taken_away_are_drained_and_others_actors_left_alone(world: World) -> None:
    for name in ("f/old", "g/d"):
        world.ray.actors[name] = FakeActor(name, {})
    keeper = world.keeper()
    world.draining = {"node-1"}
    wait_until(lambda: {name: each.draining for name, each in roster(keeper).items()} == {"p": True, "d": False})
    wait_until(lambda: world.ray.killed == ["f/old"])
    keeper.stop()
    assert list(world.ray.actors) == ["g/d"]


def test_a_head_that_is_away_is_reported_and_changes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = world.keeper()
    wait_until(lambda: len(roster(keeper)) == 2)
    before = roster(keeper)

    def away() -> list[str]:
        raise ConnectionError("no head")

    with monkeypatch.context() as patched:
        patched.setattr(fleet_keeper, "named_actors", away)
        wait_until(lambda: "no head" in msgspec.json.decode(keeper.reports())[1])
        assert roster(keeper) == before
    wait_until(lambda: not msgspec.json.decode(keeper.reports())[1])
    keeper.stop()


def with_engines(version: int, *names: str) -> bytes:
    engines = tuple(
        msgspec.structs.replace(
            WANTED.engines[0], spec=msgspec.structs.replace(WANTED.engines[0].spec, name=name), role="decode"
        )
        for name in names
    )
    return msgspec.json.encode(msgspec.structs.replace(WANTED, engines=engines, version=version))


def test_a_later_version_is_kept_also_by_a_keeper_that_begins_anew(world: World) -> None:
    keeper = world.keeper()
    wait_until(lambda: roster(keeper).keys() == {"p", "d"})
    assert keeper.want(with_engines(2, "p", "e")) == with_engines(2, "p", "e")
    wait_until(lambda: roster(keeper).keys() == {"p", "e"})
    wait_until(lambda: "f/d" in world.ray.killed)
    assert keeper.want(with_engines(1, "x")) == with_engines(2, "p", "e"), "an earlier one changes nothing"
    anew = world.keeper()
    assert anew.wanted() == with_engines(2, "p", "e")
    wait_until(lambda: roster(anew).keys() == {"p", "e"})
    anew.stop()
    keeper.stop()
    assert not any(world.stored.values())


def test_a_keeper_that_starts_late_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    class GetTimeoutError(Exception):
        """Ray's."""

    answers: list[bytes | Exception] = [GetTimeoutError(), GetTimeoutError(), b"kept"]

    def get(ref: str, timeout: float) -> bytes:
        assert ref == "answer"
        assert timeout > 0
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    ray = SimpleNamespace(get=get, exceptions=SimpleNamespace(GetTimeoutError=GetTimeoutError))
    assert once_it_runs(ray, "answer") == b"kept"
    assert [each.getMessage() for each in caplog.records] == [
        "the fleet on Ray: its keeper does not run yet; waiting for it"
    ]
