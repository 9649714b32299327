"""A Ray cluster of several "machines" on one: each node has a loopback address of its own. It ends by process ids."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tercet.cluster.ports import free_ports

from .head_settings import head_settings

# A start ends as failed when its processes have computed nothing for so long, or have computed so much in all: both
# hold on a busy machine too. Ray's own wait of 30 s for a node, which is a constant in it, is ten times as long here.
IDLE_SECONDS, CPU_SECONDS = 120.0, 600.0
PATIENT = """
import runpy, time, types
from ray._private import node
node.time = types.SimpleNamespace(monotonic=lambda: time.monotonic() / 10, sleep=time.sleep, time=time.time)
runpy.run_module("ray.scripts.scripts", run_name="__main__", alter_sys=True)
"""
STARTED = "Ray runtime started"
OF_WORKERS = range(10002, 20000)
# More than the least that Ray accepts, for objects that no test makes.
OBJECTS = 80_000_000


def cpu_seconds_of(process: psutil.Process) -> float:
    """What a process has computed; 0 if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return sum(process.cpu_times()[:2])
    return 0.0


class Node:
    """One node at ``host``, whose processes are all that descend from the one that ``ray start --block`` is.

    A head has Ray Client at ``client_port``.
    """

    def __init__(
        self, host: str, arguments: list[str], environment: dict[str, str], log: Path, client_port: int | None = None
    ) -> None:
        self.host = host
        self._client_port = client_port
        self._log = log
        self._command = [
            sys.executable, "-c", PATIENT, "start", "--block", "--disable-usage-stats",
            f"--node-ip-address={host}", f"--object-store-memory={OBJECTS}", *arguments,
        ]  # fmt: skip
        self._environment = environment
        self._started: subprocess.Popen[bytes] | None = None
        self._seen = set[psutil.Process]()

    def start(self) -> None:
        with self._log.open("wb") as log:
            self._started = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, **self._environment},
            )  # fmt: skip

    def until_started(self) -> None:
        """Wait for Ray's word for as long as its processes make progress; a start that gave up is repeated.

        A start that gave up leaves its GCS running, with the port and the files that the next start needs.
        """
        last, computed, before, since = "", dict[psutil.Process, float](), 0.0, time.monotonic()
        while not self.is_started():
            self._seen.update(self.processes())
            computed.update((each, cpu_seconds_of(each)) for each in self._seen if each.is_running())
            if (spent := sum(computed.values())) > before + 0.1:
                before, since = spent, time.monotonic()
            idle = time.monotonic() - since
            why = f"Ray does not start: {spent:.0f} s of CPU, none for {idle:.0f} s: {self.said() or last}"
            assert idle < IDLE_SECONDS, why
            assert spent < CPU_SECONDS, why
            if self._started is None or self._started.poll() is not None:
                last = self.said()
                self.kill()
                self.start()
            time.sleep(0.2)

    def is_started(self) -> bool:
        """Whether Ray says so, and its client serves: a head whose client has waited for 30 s ends after its word."""
        if STARTED not in self.said() or self._client_port is None:
            return STARTED in self.said()
        with suppress(OSError), socket.create_connection((self.host, self._client_port), timeout=5):
            return True
        return False

    def processes(self) -> list[psutil.Process]:
        """All of the node's processes now; not what has left the tree, such as a guarded engine."""
        if self._started is None:
            return []
        try:
            root = psutil.Process(self._started.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def signal(self, number: int, name: str = "") -> None:
        """Send a signal to all of its processes, or to those whose command contains ``name``."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                if name in " ".join(process.cmdline()):
                    process.send_signal(number)

    def kill(self) -> None:
        """End its processes, and those of starts that gave up."""
        self._seen.update(self.processes())
        for process in self._seen:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self._started is not None:
            self._started.wait()
        psutil.wait_procs(self._seen, timeout=30)
        self._seen.clear()

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]


class RayCluster:
    """A head with ``head_cpus``, and nodes with two each; with Ray's ``dashboard``, which takes jobs, or without."""

    def __init__(self, place: Path, nodes: int, dashboard: bool = False, head_cpus: int = 0) -> None:
        self.port, at, client = head_ports()
        self.address = f"127.0.0.2:{self.port}"
        self.place = place
        # No test submits tasks: Ray's workers in reserve would only import Ray, one for each CPU.
        environment = {
            **head_settings(str(place / "gcs")), "RAY_memory_monitor_refresh_ms": "0",
            "RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0",
            # By default 15: on a busy machine, engines would get a fortieth of the time that other processes get.
            "RAY_worker_niceness": "0",
        }  # fmt: skip
        (place / "gcs").mkdir()
        self.dashboard = f"http://127.0.0.2:{at}"
        head = [
            "--head", f"--port={self.port}", f"--num-cpus={head_cpus}", f"--temp-dir={place}/r",
            f"--include-dashboard={str(dashboard).lower()}", "--dashboard-host=127.0.0.2", f"--dashboard-port={at}",
            f"--ray-client-server-port={client}",
        ]  # fmt: skip
        self.head = Node("127.0.0.2", head, environment, place / "head.log", client)
        joining = [f"--address={self.address}"]
        self.nodes = [
            Node(f"127.0.0.{index + 3}", [*joining, "--num-cpus=2"], environment, place / f"{index}.log")
            for index in range(nodes)
        ]

    def start(self) -> None:
        self.head.start()
        self.head.until_started()
        for node in self.nodes:
            node.start()
        for node in self.nodes:
            node.until_started()

    def start_head_again(self) -> None:
        """As a head's machine that is back does.

        Ray refuses a head whose address its nodes on the same machine name, if an earlier one has left this file: it
        takes the head to run already. On a machine of a real cluster there are no other nodes.
        """
        (self.place / "r" / "ray_current_cluster").unlink(missing_ok=True)
        self.head.start()
        self.head.until_started()

    def end(self) -> None:
        for node in [*self.nodes, self.head]:
            node.kill()


@contextmanager
def ray_cluster(nodes: int = 2, dashboard: bool = False, head_cpus: int = 0) -> Generator[RayCluster]:
    """Run one while entered."""
    place = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # Ray's sockets need short paths
    cluster = RayCluster(place, nodes, dashboard, head_cpus)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(place, ignore_errors=True)


def head_ports() -> list[int]:
    """Three free ports for a head, none of which Ray keeps for its workers."""
    found = [port for port in free_ports("127.0.0.2", 60) if port not in OF_WORKERS]
    return found[:3]
