"""The state of routers on several machines in the head of a Ray cluster, as :mod:`.state_configmap` has it elsewhere.

Ray ends a process that is connected to its head when that is away for long, so no router is. A small process asks the
head for it; that one may end, and the next call starts another.
"""

from __future__ import annotations

import select
import subprocess
import sys
import threading
import time

import msgspec

from tercet.protocol import EngineError
from tercet.protocol.wire import UNREADABLE
from tercet.router.state_configmap import ConfigMapStore, Json

PROCESS = "tercet.cluster.on_ray.kept_objects_process"
NAMESPACE = "ray"
START_SECONDS = 60.0
ANSWER_SECONDS = 3.0


class HeadAccess:
    """Calls of the head at ``address`` that block; any thread may call, one at a time is served.

    ``argv`` starts the process that asks the head.
    """

    def __init__(self, address: str, argv: tuple[str, ...] = (sys.executable, "-m", PROCESS)) -> None:
        self._address = address
        self._argv = (*argv, address)
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process before it is needed: it imports for a second or more."""
        with self._lock:
            self._running()

    def ask(self, method: str, path: str, body: Json | None) -> tuple[int, Json]:
        """As :func:`tercet.router.state_configmap.asking`."""
        with self._lock:
            try:
                return self._asked(msgspec.json.encode((method, path, body)) + b"\n")
            except (OSError, *UNREADABLE) as error:
                self._end()
                raise EngineError(f"state: Ray's head at {self._address} does not answer: {error}") from error

    def _asked(self, line: bytes) -> tuple[int, Json]:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line)
        process.stdin.flush()
        seconds = max(ANSWER_SECONDS, self._started + START_SECONDS - time.monotonic())
        if not select.select([process.stdout], [], [], seconds)[0]:
            raise TimeoutError(f"not within {seconds:.0f} s")
        return msgspec.json.decode(process.stdout.readline(), type=tuple[int, Json])

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._started = time.monotonic()
        return self._process

    def _end(self) -> None:
        """It may hang, and has nothing to finish."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def ray_store(given: str) -> ConfigMapStore:
    """The store in ``[HOST:PORT/]NAME``; without an address, in the cluster of this machine."""
    address, _, name = given.rpartition("/")
    head = HeadAccess(address or "auto")
    head.start()
    return ConfigMapStore(head.ask, NAMESPACE, name, kinds=("record", "lease"))
