"""The actor that owns one engine process: it starts and restarts the process, and reports its state."""

from __future__ import annotations

import http.client
import os
import threading
import time
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from tercet.cluster.devices import CoreClaims, devices_for_engines
from tercet.cluster.engine_command import EngineSpec, engine_argv, engine_env
from tercet.cluster.model import cache_root
from tercet.cluster.ports import free_ports, url_of
from tercet.cluster.running_fleet import Restarts
from tercet_ray.detached_process import DetachedProcess
from tercet_ray.ray_access import here, the_ray
from tercet_ray.reconcile import READY, STARTING
from tercet_ray.wanted import OwnerReport, WantedEngine

ASK_SECONDS = 0.5
OUT_OF_RESTARTS = 1


class EngineOwner:
    """Owner of the engine that ``wanted`` describes, as JSON. ``cores`` is the number of cores requested from Ray.

    When the engine exceeds its limit of restarts, the actor's process ends, and Ray starts the actor again, perhaps on
    another machine. When this process ends for any reason, the engine ends too.
    """

    def __init__(self, wanted: bytes, cores: int) -> None:
        self._wanted = msgspec.json.decode(wanted, type=WantedEngine)
        self._host, self._node = here(the_ray())
        self._claims = CoreClaims()
        self._spec = self._placed(self._wanted.spec, cores)
        self._start = uuid.uuid4().hex
        self._count = 0
        self._stopping = threading.Event()
        self._process: DetachedProcess | None = None
        self._report = OwnerReport("", "", STARTING, self._node, self._host, "")
        self._thread = threading.Thread(target=self._keep, name="tercet-engine", daemon=True)
        self._thread.start()

    def report(self) -> bytes:
        """Return the engine's last start, as JSON of an :class:`~tercet_ray.wanted.OwnerReport`."""
        return msgspec.json.encode(self._report)

    def stop(self) -> None:
        """Stop the engine for good, and return when it has ended."""
        self._stopping.set()
        self._thread.join()

    def _placed(self, spec: EngineSpec, cores: int) -> EngineSpec:
        """Return the engine's description with devices that Ray assigned, or with cores that no other engine uses."""
        spec = msgspec.structs.replace(spec, host=self._host)
        if spec.simulate is not None:
            return spec
        if devices_for_engines():
            given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            return msgspec.structs.replace(spec, gpus=tuple(filter(None, given.split(","))))
        return msgspec.structs.replace(spec, cores=self._claims.claim(cores))

    def _keep(self) -> None:
        restarts = Restarts(self._wanted.restarts)
        while True:
            self._run_once(restarts)
            if self._stopping.is_set():
                return
            pause = restarts.ended(time.monotonic())
            if pause is None:
                os._exit(OUT_OF_RESTARTS)
            if self._stopping.wait(pause):
                return

    def _run_once(self, restarts: Restarts) -> None:
        """Start the engine once, and wait until it ends or is to stop."""
        self._count += 1
        spec = msgspec.structs.replace(self._spec, port=free_ports(self._host, 1)[0])
        url, log = url_of(spec.host, spec.port), self._log()
        uid = f"{self._start}.{self._count}"
        self._report = OwnerReport(uid, url, STARTING, self._node, self._host, str(log))
        process = DetachedProcess(engine_argv(spec), {**_environment(), **engine_env(spec), **self._environment()}, log)
        try:
            process.start()
            while not process.ended_within(ASK_SECONDS) and not self._stopping.is_set():
                if self._report.state != READY and _answers(url):
                    self._report = msgspec.structs.replace(self._report, state=READY)
                    restarts.ready(time.monotonic())
        finally:
            process.stop()
            self._report = msgspec.structs.replace(self._report, state="the engine has ended")

    def _environment(self) -> dict[str, str]:
        return dict(self._wanted.environment)

    def _log(self) -> Path:
        place = Path(self._wanted.log_dir) if self._wanted.log_dir is not None else cache_root() / "logs" / "ray"
        place.mkdir(parents=True, exist_ok=True)
        return place / f"{self._spec.name}-{self._start[:8]}-{self._count}.log"


def _environment() -> dict[str, str]:
    """Return the number of OpenMP threads for an engine, since Ray sets a number that is meant for its workers."""
    return {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}


def _answers(url: str) -> bool:
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
