"""The state of routers on several machines in the head of a Ray cluster; otherwise as in a ConfigMap.

Ray ends a process that is connected to its head when the head is away for long, so a router must not connect. A small
process calls the head for it; that process may end, and the next call starts another one.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import msgspec

from tercet.protocol import EngineError
from tercet.protocol.wire import UNREADABLE
from tercet.router.state.state_store import ConfigMapStore, Json

PROCESS = "tercet_ray.ray_access"
NAMESPACE = "ray"
START_SECONDS = 60.0
ANSWER_SECONDS = 3.0


class HeadAccess:
    """Blocking calls of the head at ``address``, by a process with ``argv``, from any thread, one call at a time."""

    def __init__(self, address: str, argv: tuple[str, ...] = (sys.executable, "-m", PROCESS)) -> None:
        self._address, self._argv = address, (*argv, address)
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process before it is needed, since its imports take a second or more."""
        with self._lock:
            self._running()

    def ask(self, method: str, path: str, body: Json | None) -> tuple[int, Json]:
        """Call the head; the arguments and errors are those of :func:`tercet.router.state.state_store.asking`."""
        with self._lock:
            try:
                process = self._running()
                assert process.stdin is not None
                assert process.stdout is not None
                began = time.monotonic()
                seconds = max(ANSWER_SECONDS, self._started + START_SECONDS - began)
                # A stopped process does not read, and may have written half a line: only its end ends both.
                ending = threading.Timer(seconds, process.kill)
                ending.daemon = True
                ending.start()
                try:
                    process.stdin.write(msgspec.json.encode((method, path, body)) + b"\n")
                    process.stdin.flush()
                    answer = process.stdout.readline()
                finally:
                    ending.cancel()
                    if time.monotonic() - began >= seconds:
                        raise TimeoutError(f"no answer within {seconds:.0f} s")
                return msgspec.json.decode(answer, type=tuple[int, Json])
            except (OSError, *UNREADABLE) as error:
                self._end()
                raise EngineError(f"state: Ray's head at {self._address} does not answer: {error}") from error

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._started = time.monotonic()
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()  # it may hang, and has nothing to finish
            self._process.communicate()
            self._process = None


def ray_store(given: str) -> ConfigMapStore:
    """Return the store ``[HOST:PORT/]NAME``; without an address, that of this machine's cluster."""
    address, _, name = given.rpartition("/")
    head = HeadAccess(address or "auto")
    head.start()
    return ConfigMapStore(head.ask, NAMESPACE, name, kinds=("record", "lease"))
