"""The actor that keeps the wanted engines of a fleet running on Ray: it has an owner for each, and their reports."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from tercet.fleet.discovery.roster import write_roster
from tercet_ray.engine_owner import EngineOwner
from tercet_ray.ray_access import draining_nodes, head_node, named_actors, store, stored, the_ray
from tercet_ray.reconcile import roster_of, unwanted
from tercet_ray.wanted import NAMESPACE, OwnerReport, WantedEngine, WantedFleet, actor_options

LOOK_SECONDS = 1.0
STOP_SECONDS = 60.0


class FleetKeeper:
    """Keeper of the fleet that ``wanted`` describes, as JSON of a :class:`~tercet_ray.wanted.WantedFleet`.

    When its machine is lost, Ray starts the keeper on another one. It then finds its owners by their names, and the
    newest wanted fleet in the store of Ray's head.
    """

    def __init__(self, wanted: bytes) -> None:
        self._ray = the_ray()
        self._content = wanted
        self._wanted = msgspec.json.decode(wanted, type=WantedFleet)
        self._take_wanted(stored(self._wanted.keeper) or wanted)
        self._owners: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}
        self._reports: dict[str, OwnerReport] = {}
        self._draining: set[str] = set()
        self._failure = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="tercet-keeper", daemon=True)
        self._thread.start()

    def roster(self) -> bytes:
        """Return the roster of engines that have reported; see :mod:`tercet.fleet.discovery.roster`."""
        return write_roster(roster_of(self._wanted.engines, self._reports, self._draining))

    def wanted(self) -> bytes:
        """Return the wanted fleet, as JSON."""
        return self._content

    def want(self, content: bytes) -> bytes:
        """Keep the fleet ``content`` from now on, unless a later version is already wanted; return the wanted fleet."""
        if msgspec.json.decode(content, type=WantedFleet).version > self._wanted.version:
            store(self._wanted.keeper, content)  # stored first, so that a restarted keeper finds it
            self._take_wanted(content)
        return self._content

    def reports(self) -> bytes:
        """Return, as JSON, the newest report of each engine by name, and the last round's error, or an empty text."""
        return msgspec.json.encode((self._reports, self._failure))

    def stop(self) -> None:
        """Stop every engine and then every owner; return when they have ended."""
        self._stopping.set()
        self._thread.join()
        owners = [self._ray.get_actor(name, namespace=NAMESPACE) for name in self._actors(())]
        ending = [owner.stop.remote() for owner in owners]
        if ending:
            self._ray.wait(ending, num_returns=len(ending), timeout=STOP_SECONDS)
        for owner in owners:
            self._ray.kill(owner, no_restart=True)
        store(self._wanted.keeper, None)

    def _take_wanted(self, content: bytes) -> None:
        self._content, self._wanted = content, msgspec.json.decode(content, type=WantedFleet)

    def _keep(self) -> None:
        while not self._stopping.is_set():
            try:
                self._look()
                self._failure = ""
            except Exception as error:  # Ray's head does not answer, or has no room: retry in the next round
                self._failure = f"{type(error).__name__}: {error}"
            self._stopping.wait(LOOK_SECONDS)

    def _look(self) -> None:
        wanted = self._wanted
        self._forget_but({each.spec.name for each in wanted.engines})
        for engine in wanted.engines:
            name = engine.spec.name
            if name not in self._asked:
                self._asked[name] = self._owner(engine).report.remote()
        names = {ref: name for name, ref in self._asked.items()}
        answered, _ = self._ray.wait(list(names), num_returns=len(names), timeout=LOOK_SECONDS)
        for ref in answered:
            name = names[ref]
            del self._asked[name]
            self._take(name, ref)
        self._draining = draining_nodes(self._ray)
        self._end_unwanted()

    def _forget_but(self, names: set[str]) -> None:
        """Drop the records of engines that are not in ``names``."""
        for known in (self._asked, self._owners, self._reports):
            for name in known.keys() - names:
                del known[name]

    def _take(self, name: str, ref: Any) -> None:
        """Record an owner's report. Drop an owner that has died for good; the next round creates a new one."""
        try:
            report = msgspec.json.decode(self._ray.get(ref), type=OwnerReport)
        except self._ray.exceptions.ActorUnavailableError:
            return
        except self._ray.exceptions.RayActorError:
            self._owners.pop(name, None)
            return
        self._reports[name] = report

    def _owner(self, engine: WantedEngine) -> Any:
        name = engine.spec.name
        if name not in self._owners:
            resources = self._wanted.resources
            options = actor_options(self._wanted.owner(name), resources, head_node(self._ray))
            kind = self._ray.remote(EngineOwner).options(**options)
            self._owners[name] = kind.remote(msgspec.json.encode(engine), max(1, int(resources.cpus)))
        return self._owners[name]

    def _end_unwanted(self) -> None:
        for name in self._actors(self._wanted.engines):
            self._ray.kill(self._ray.get_actor(name, namespace=NAMESPACE), no_restart=True)

    def _actors(self, but: Sequence[WantedEngine]) -> list[str]:
        """Return the names of this fleet's owners, except those of the engines ``but``."""
        return unwanted(self._wanted.name, but, named_actors(), self._wanted.keeper)
