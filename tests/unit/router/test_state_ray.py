"""Routers on several machines share a state in Ray's head, by the code that claims and changes Kubernetes' objects."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tercet.protocol import BadRequest, EngineError
from tercet.router.serve.plans import Plan
from tercet.router.state.fleet_state import FleetState, StateFile
from tercet.router.state.state_store import ConfigMapStore
from tercet.settings import RouterConfig
from tercet_ray import state_ray
from tercet_ray.ray_access import CONFLICT, KEPT, OK, UNKNOWN, HeadStore, Json, KeptObjects
from tercet_ray.state_ray import HeadAccess, ray_store
from tests.long_runs import in_full
from tests.unit.cluster.on_ray.ray_cluster import ray_cluster

from .test_fleet_state import FIRST
from .test_state_configmap import TurnsOfMachines

NOWHERE = Path("/nowhere")
OBJECT = "/records/fleet"


class KeysInMemory(HeadStore):
    """Ray's key-value store: each call is whole, and others may come between two. ``before_put`` is called once."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.before_put: Callable[[], object] | None = None
        self._lock = threading.Lock()

    def put_new(self, key: str, value: bytes) -> bool:
        between, self.before_put = self.before_put, None
        if between is not None:
            between()
        with self._lock:
            return self.values.setdefault(key, value) is value

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def delete(self, key: str) -> None:
        with self._lock:
            self.values.pop(key, None)

    def keys(self, prefix: str) -> list[str]:
        with self._lock:
            return [key for key in self.values if key.startswith(prefix)]


def head() -> KeptObjects:
    return KeptObjects(KeysInMemory())


class TurnsOnRay(TurnsOfMachines):
    def objects(self) -> KeptObjects:
        return head()


# The same turns as over a ConfigMap, of which `make check` has those.
TestTurnsOnRay = pytest.mark.slow(TurnsOnRay.TestCase)


def state_in(store: KeysInMemory) -> StateFile:
    return StateFile(NOWHERE, ConfigMapStore(KeptObjects(store).ask, "ray", "fleet"))


def change_together(files: list[StateFile], times: int) -> None:
    """All of them change the state at the same time, and each change is there in the end.

    A thread that stands still while others make :data:`KEPT` changes is told that its change may or may not be there.
    """
    unknown: list[str] = []

    def work(file: StateFile) -> None:
        for _ in range(times):
            try:
                file.update(lambda state: state.with_program(Plan(program="p")), FIRST)
            except EngineError as error:
                unknown.append(error.message)

    before = files[0].update(lambda state: state, FIRST)
    threads = [threading.Thread(target=work, args=(each,)) for each in files]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert all("paused while others changed" in each for each in unknown), unknown
    found = files[0].read()
    assert found is not None
    changes = found.version - before.version
    assert times * len(files) - len(unknown) <= changes <= times * len(files)
    assert found.program.number == before.program.number + changes


def test_no_change_of_several_routers_is_lost() -> None:
    store = KeysInMemory()
    change_together([state_in(store) for _ in range(3)], 25)
    assert len(store.values) <= KEPT + 3, "old versions go"


def made(objects: KeptObjects, value: str) -> Json:
    status, found = objects.ask("POST", OBJECT.rpartition("/")[0], {"metadata": {"name": "fleet"}, "data": value})
    assert status == 201
    return found


def changed(objects: KeptObjects, value: str, found: Json) -> tuple[int, Json]:
    return objects.ask("PATCH", OBJECT, {"metadata": found["metadata"], "data": value})


def test_an_object_is_made_once_and_changed_as_it_was_read() -> None:
    objects = head()
    assert objects.ask("GET", OBJECT, None) == (404, {})
    assert objects.ask("PATCH", OBJECT, {"metadata": {"resourceVersion": "1"}}) == (404, {})
    first = made(objects, "a")
    assert objects.ask("POST", "/records", {"metadata": {"name": "fleet"}})[0] == CONFLICT
    status, second = changed(objects, "b", first)
    assert (status, second["data"]) == (OK, "b")
    assert changed(objects, "late", first)[0] == CONFLICT
    assert objects.ask("GET", OBJECT, None) == (OK, second)


@pytest.mark.parametrize("others", [0, 1, KEPT - 1, KEPT, KEPT + 1, 3 * KEPT])
def test_a_writer_that_stood_still_before_it_wrote_is_told(others: int) -> None:
    store = KeysInMemory()
    objects = KeptObjects(store)
    first = made(objects, "first")

    def change() -> None:
        found = objects.ask("GET", OBJECT, None)[1]
        for number in range(others):
            _, found = changed(objects, f"other {number}", found)

    store.before_put = change
    status, _ = changed(objects, "mine", first)
    found = objects.ask("GET", OBJECT, None)[1]["data"]
    if others:
        assert status in (CONFLICT, UNKNOWN)
        assert found == f"other {others - 1}"
    else:
        assert (status, found) == (OK, "mine")


ANSWERS = "import json, sys\nfor line in sys.stdin: print(json.dumps([200, {'asked': json.loads(line)}]), flush=True)"
SILENT = "import sys\nfor line in sys.stdin: pass"
HALF = "import sys\nfor line in sys.stdin: print('[200', end='', flush=True)"
DEAF = "import time\ntime.sleep(600)"


def test_a_process_asks_and_another_one_is_started_when_it_ends() -> None:
    access = HeadAccess("somewhere", (sys.executable, "-c", ANSWERS))
    assert access.ask("GET", OBJECT, None) == (200, {"asked": ["GET", OBJECT, None]})
    process = access._running()
    process.kill()
    process.wait()
    assert access.ask("GET", "/other", None)[0] == 200
    access._end()


def test_a_head_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_ray, "START_SECONDS", 0.2)
    monkeypatch.setattr(state_ray, "ANSWER_SECONDS", 0.2)
    access = HeadAccess("10.0.0.1:6379", (sys.executable, "-c", SILENT))
    with pytest.raises(EngineError, match=r"Ray's head at 10\.0\.0\.1:6379 does not answer: no answer within"):
        access.ask("GET", OBJECT, None)
    ends = HeadAccess("10.0.0.1:6379", (sys.executable, "-c", "raise SystemExit(1)"))
    with pytest.raises(EngineError, match="does not answer"):
        ends.ask("GET", OBJECT, None)


@pytest.mark.parametrize("does", [HALF, DEAF])
def test_a_process_that_stops_in_the_middle_is_replaced(does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that does not read a line that is larger than its pipe."""
    monkeypatch.setattr(state_ray, "START_SECONDS", 0.3)
    monkeypatch.setattr(state_ray, "ANSWER_SECONDS", 0.3)
    access = HeadAccess("10.0.0.1:6379", (sys.executable, "-c", does))
    with pytest.raises(EngineError, match="no answer within"):
        access.ask("PUT", OBJECT, {"data": "x" * 500_000})
    monkeypatch.setattr(state_ray, "START_SECONDS", 60.0)
    access._argv = (sys.executable, "-c", ANSWERS)
    assert access.ask("GET", OBJECT, None)[0] == 200
    access._end()


def test_one_place_has_the_state() -> None:
    with pytest.raises(BadRequest, match="cannot be combined with state-configmap"):
        RouterConfig(await_engines=True, state_ray="fleet", state_configmap="fleet")
    for wrong in ("host/fleet", "a b", ""):
        with pytest.raises(Exception, match=r"state.ray"):
            RouterConfig(await_engines=True, state_ray=wrong)


@in_full("the same code over a store in memory")
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray")
def test_two_routers_and_a_head_that_is_away() -> None:
    with ray_cluster(nodes=0) as cluster:
        stores = [ray_store(f"{cluster.address}/fleet") for _ in range(2)]
        one, two = (StateFile(NOWHERE, store) for store in stores)
        change_together([one, two], 20)
        holder, other = (store.turn("roles") for store in stores)
        assert holder.take()
        assert not other.take()
        before = one.read()

        cluster.head.kill()
        with pytest.raises(EngineError, match="state: "):
            two.read()
        assert holder.take(), "a head that is away for a moment takes nothing away"
        cluster.start_head_again()
        assert readable(two) == before
        change_together([one, two], 5)
        holder.release()
        assert other.take()


def readable(file: StateFile) -> FleetState | None:
    """The state, once the head answers again."""
    while True:
        try:
            return file.read()
        except EngineError:
            time.sleep(0.5)
