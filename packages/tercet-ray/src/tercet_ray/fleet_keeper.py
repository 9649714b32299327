"""A fleet's engines on Ray: what is wanted, the owner of each engine process, and the keeper of all owners.

A :class:`WantedFleet` is plain data that the follower sends to the keeper, and it to the owners. A
:class:`DetachedProcess` is one start of an engine; an :class:`EngineOwner` is the actor that starts and restarts it;
the :class:`FleetKeeper` is the actor that has an owner for each wanted engine, and their reports.
"""

from __future__ import annotations

import fcntl
import http.client
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tercet.cluster import guard
from tercet.cluster.child_process import GRACE_SECONDS
from tercet.cluster.devices import devices_for_engines
from tercet.cluster.engine_command import EngineSpec, engine_argv, engine_env
from tercet.cluster.model import cache_root
from tercet.cluster.ports import free_ports, url_of
from tercet.cluster.running_fleet import Restarts
from tercet.fleet.discovery import RosterEntry, write_roster
from tercet.protocol import EngineError, Role
from tercet_ray.ray_access import NAMESPACE, draining_nodes, head_node, here, named_actors, store, stored, the_ray


class WantedEngine(msgspec.Struct, frozen=True):
    """One engine; its owner chooses host, port, cores and devices at the start. ``environment`` may hold a secret."""

    spec: EngineSpec
    role: Role
    environment: Mapping[str, str] = {}
    restarts: int = 5
    log_dir: str | None = None


class Resources(msgspec.Struct, frozen=True):
    """Resources that each engine requests from Ray."""

    cpus: float = 1.0
    gpus: int = 0
    memory_gib: float = 0.0
    head: bool = False  # the machine of Ray's head may have engines


class WantedFleet(msgspec.Struct, frozen=True):
    """A fleet; its actors' names begin with its own."""

    name: str
    address: str  # of Ray's head, ``auto`` for a cluster of this machine
    engines: tuple[WantedEngine, ...]
    resources: Resources = Resources()
    version: int = 1  # the fleet with the higher one replaces another; each change of the engines increases it by 1

    @property
    def keeper(self) -> str:
        return f"{self.name}/keeper"

    def owner(self, engine: str) -> str:
        return f"{self.name}/{engine}"


class OwnerReport(msgspec.Struct, frozen=True):
    """An owner's report about one start of an engine."""

    uid: str
    url: str  # empty until the engine has an address
    state: str  # ``starting``, ``ready``, or a description of the end
    node: str  # the Ray id of the machine, and its address
    host: str
    log: str  # a file on that machine


def actor_options(name: str, resources: Resources, head_node: str) -> dict[str, Any]:
    """Return Ray's options of an engine's owner: restarts without a limit, and not on the head's machine by default."""
    options: dict[str, Any] = {
        "name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True, "max_restarts": -1,
        "max_concurrency": 4, "num_cpus": resources.cpus, "scheduling_strategy": "SPREAD",
    }  # fmt: skip
    if resources.gpus:
        options["num_gpus"] = resources.gpus
    if resources.memory_gib:
        options["memory"] = int(resources.memory_gib * 1024**3)
    if head_node and not resources.head:
        options["label_selector"] = {"ray.io/node-id": f"!{head_node}"}
    return options


READY, STARTING = "ready", "starting"


def roster_of(
    wanted: Sequence[WantedEngine], reports: Mapping[str, OwnerReport], draining: Collection[str]
) -> list[RosterEntry]:
    """Return the roster: each wanted engine that has an address, with its newest start.

    ``draining`` are the ids of nodes that Ray will remove. An engine whose owner does not answer keeps its last report;
    the router itself checks that the engine serves.
    """
    entries = list[RosterEntry]()
    for each in wanted:
        report = reports.get(each.spec.name)
        if report is not None and report.url:
            withheld, leaves = "" if report.state == READY else report.state[:256], report.node in draining
            entries.append(RosterEntry(each.spec.name, report.url, report.uid, each.role, leaves, withheld))
    return entries


def merged(
    wanted: Sequence[WantedEngine], before: Sequence[RosterEntry], now: Sequence[RosterEntry]
) -> list[RosterEntry]:
    """Return the roster that follows ``before``: an engine that is not in ``now`` keeps its entry.

    Entries are missing while an engine's owner restarts, or while the keeper restarts, which then knows no engines.
    """
    entries = {each.name: each for each in (*before, *now)}
    return [entries[each.spec.name] for each in wanted if each.spec.name in entries]


def unwanted(fleet: str, wanted: Sequence[WantedEngine], owners: Collection[str], keeper: str) -> list[str]:
    """Return the names of this fleet's actors without a wanted engine, such as those of an earlier, larger fleet."""
    kept = {f"{fleet}/{each.spec.name}" for each in wanted} | {keeper}
    return sorted(name for name in owners if name.startswith(f"{fleet}/") and name not in kept)


START_SECONDS = 30.0
# Forks a guard outside of its caller's children, and prints the guard's process id: `-c FORKED LOG GUARD...`. When Ray
# ends a worker, it kills the worker's children at once, and a guard among them could not end its engine. The guard is
# therefore a grandchild, in a separate process group. Standard input is the guard's pipe.
FORKED = """
import os, sys
output = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
child = os.fork()
if child:
    print(child, flush=True)
else:
    os.setpgid(0, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.execv(sys.argv[2], sys.argv[2:])
"""


class DetachedProcess:
    """One start of a guarded command that is not a child of this process, and ends with it, even after SIGKILL.

    A pipe, whose other end the guard reads, is the only connection between the command and this process. Several
    threads may call its methods, except :meth:`start`.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path, grace: float = GRACE_SECONDS) -> None:
        self._argv, self._env, self._log, self._grace = argv, env, log, grace
        self._lifeline = self._pidfd = -1
        self._sockets = ""
        self.pid = 0

    def start(self) -> None:
        """Start the command; raise :class:`~tercet.protocol.EngineError` if that fails."""
        guards_end, self._lifeline = os.pipe()
        self._sockets = tempfile.mkdtemp(prefix=guard.SOCKETS_PREFIX)
        python = [sys.executable, "-I", "-S"]
        command = [*python, guard.__file__, str(self._grace), *self._argv]
        try:
            started = subprocess.run(
                [*python, "-c", FORKED, str(self._log), *command],
                stdin=guards_end, capture_output=True, timeout=START_SECONDS, check=True,
                env={**os.environ, guard.SOCKETS: self._sockets, **self._env},
            )  # fmt: skip
            self.pid = int(started.stdout)
            self._pidfd = os.pidfd_open(self.pid)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self.close()
            raise EngineError(f"a process cannot be started: {error}") from error
        finally:
            os.close(guards_end)

    def ended_within(self, seconds: float) -> bool:
        """Return True if the guard, and with it the command, has ended or ends within ``seconds``."""
        return self._pidfd < 0 or bool(select.select([self._pidfd], [], [], seconds)[0])

    def stop(self) -> None:
        """Stop the command: SIGTERM, and SIGKILL to the group after the grace period."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
        self.ended_within(self._grace)
        if self.pid:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.close()

    def let_go(self) -> None:
        """Close the pipe and return at once; the guard then sends SIGTERM, and SIGKILL after the grace period."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
        self._lifeline = -1

    def close(self) -> None:
        """Close the pipe, and release the resources of this process for the command."""
        self.let_go()
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._pidfd = -1
        shutil.rmtree(self._sockets, ignore_errors=True)


ASK_SECONDS = 0.5


class EngineOwner:
    """Owner of the engine that ``wanted`` describes, as JSON. ``cores`` is the number of cores requested from Ray.

    When the engine exceeds its limit of restarts, the actor's process ends, and Ray starts the actor again, perhaps on
    another machine. When this process ends for any reason, the engine ends too.
    """

    def __init__(self, wanted: bytes, cores: int) -> None:
        self._wanted = msgspec.json.decode(wanted, type=WantedEngine)
        self._host, self._node = here(the_ray())
        self._spec = spec = msgspec.structs.replace(self._wanted.spec, host=self._host)
        if spec.simulate is None and devices_for_engines():  # those that Ray assigned
            given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            self._spec = msgspec.structs.replace(spec, gpus=tuple(filter(None, given.split(","))))
        elif spec.simulate is None:  # cores that no other engine uses
            self._claims = CoreClaims()
            self._spec = msgspec.structs.replace(spec, cores=self._claims.claim(cores))
        self._start = uuid.uuid4().hex
        self._count = 0
        self._stopping = threading.Event()
        self._report = OwnerReport("", "", STARTING, self._node, self._host, "")
        self._thread = threading.Thread(target=self._keep, name="tercet-engine", daemon=True)
        self._thread.start()

    def report(self) -> bytes:
        """Return the engine's last start, as JSON of an :class:`~tercet_ray.fleet_keeper.OwnerReport`."""
        return msgspec.json.encode(self._report)

    def stop(self) -> None:
        """Stop the engine for good, and return when it has ended."""
        self._stopping.set()
        self._thread.join()

    def _keep(self) -> None:
        restarts = Restarts(self._wanted.restarts)
        while True:
            self._run_once(restarts)
            if self._stopping.is_set():
                return
            pause = restarts.ended(time.monotonic())
            if pause is None:
                os._exit(1)  # Ray starts the actor again
            if self._stopping.wait(pause):
                return

    def _run_once(self, restarts: Restarts) -> None:
        """Start the engine once, and wait until it ends or is to stop."""
        self._count += 1
        spec = msgspec.structs.replace(self._spec, port=free_ports(self._host, 1)[0])
        directory = Path(self._wanted.log_dir) if self._wanted.log_dir is not None else cache_root() / "logs" / "ray"
        directory.mkdir(parents=True, exist_ok=True)
        url, log = url_of(spec.host, spec.port), directory / f"{spec.name}-{self._start[:8]}-{self._count}.log"
        uid = f"{self._start}.{self._count}"
        self._report = OwnerReport(uid, url, STARTING, self._node, self._host, str(log))
        # Ray sets a number of OpenMP threads that is meant for its workers.
        threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        process = DetachedProcess(engine_argv(spec), {**threads, **engine_env(spec), **self._wanted.environment}, log)
        try:
            process.start()
            while not process.ended_within(ASK_SECONDS) and not self._stopping.is_set():
                if self._report.state != READY and _answers(url):
                    self._report = msgspec.structs.replace(self._report, state=READY)
                    restarts.ready(time.monotonic())
        finally:
            process.stop()
            self._report = msgspec.structs.replace(self._report, state="the engine has ended")


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    asking = closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=5))
    with suppress(OSError, http.client.HTTPException), asking as connection:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    return False


LOOK_SECONDS = 1.0
STOP_SECONDS = 60.0


class FleetKeeper:
    """Keeper of the fleet that ``wanted`` describes, as JSON of a :class:`~tercet_ray.fleet_keeper.WantedFleet`.

    When its machine is lost, Ray starts the keeper on another one. It then finds its owners by their names, and the
    newest wanted fleet in the store of Ray's head.
    """

    def __init__(self, wanted: bytes) -> None:
        self._ray = the_ray()
        name = msgspec.json.decode(wanted, type=WantedFleet).keeper
        self._wanted = msgspec.json.decode(stored(name) or wanted, type=WantedFleet)
        # By engine: its owner, the report that was asked for, and its last report.
        self._owners: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}
        self._reports: dict[str, OwnerReport] = {}
        self._draining: set[str] = set()
        self._failure = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="tercet-keeper", daemon=True)
        self._thread.start()

    def roster(self) -> bytes:
        return write_roster(roster_of(self._wanted.engines, self._reports, self._draining))

    def wanted(self) -> bytes:
        return msgspec.json.encode(self._wanted)

    def want(self, content: bytes) -> bytes:
        """Keep the fleet ``content`` from now on, unless a later version is already wanted; return the wanted fleet."""
        wanted = msgspec.json.decode(content, type=WantedFleet)
        if wanted.version > self._wanted.version:
            store(self._wanted.keeper, content)  # stored first, so that a restarted keeper finds it
            self._wanted = wanted
        return self.wanted()

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

    def _keep(self) -> None:
        while not self._stopping.is_set():
            try:
                self._look()
                self._failure = ""
            except Exception as error:  # Ray's head does not answer, or has no room: retry in the next round
                self._failure = f"{type(error).__name__}: {error}"
            self._stopping.wait(LOOK_SECONDS)

    def _look(self) -> None:
        ray, wanted = self._ray, self._wanted
        for known in (self._asked, self._owners, self._reports):
            for name in known.keys() - {each.spec.name for each in wanted.engines}:
                del known[name]
        for engine in wanted.engines:
            name = engine.spec.name
            if name not in self._owners and name not in self._asked:
                options = actor_options(wanted.owner(name), wanted.resources, head_node(ray))
                owner = ray.remote(EngineOwner).options(**options)
                self._owners[name] = owner.remote(msgspec.json.encode(engine), max(1, int(wanted.resources.cpus)))
            if name not in self._asked:
                self._asked[name] = self._owners[name].report.remote()
        names = {ref: name for name, ref in self._asked.items()}
        answered, _ = ray.wait(list(names), num_returns=len(names), timeout=LOOK_SECONDS)
        for ref in answered:
            del self._asked[names[ref]]
            try:
                self._reports[names[ref]] = msgspec.json.decode(ray.get(ref), type=OwnerReport)
            except ray.exceptions.ActorUnavailableError:
                continue
            except ray.exceptions.RayActorError:  # it has died for good; the next round creates another one
                self._owners.pop(names[ref], None)
        self._draining = draining_nodes(ray)
        for name in self._actors(wanted.engines):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)

    def _actors(self, but: Sequence[WantedEngine]) -> list[str]:
        """Return the names of this fleet's owners, except those of the engines ``but``."""
        return unwanted(self._wanted.name, but, named_actors(), self._wanted.keeper)


class CoreClaims:
    """Claims of this process until its end: a file lock for each core."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or (Path(tempfile.gettempdir()) / f"tercet-cores-{os.getuid()}")
        self._held: dict[int, int] = {}

    def claim(self, count: int) -> tuple[int, ...]:
        """Return ``count`` of the cores that this process may use, unclaimed cores first."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        mine = sorted(os.sched_getaffinity(0))
        free = [core for core in mine if len(self._held) < count and self._take(core)]
        taken = [core for core in mine if core not in free]
        return tuple(sorted([*free, *taken[: max(0, min(count, len(mine)) - len(free))]]))

    def release(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def _take(self, core: int) -> bool:
        lock = os.open(self._directory / str(core), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._held[core] = lock
        return True
