"""A worker's process: ``python -m tercet.router.workers.worker STARTED``, started by the supervisor alone."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys

import msgspec

from tercet.router.server import serve
from tercet.router.workers.sharing import Shared, SupervisorLine
from tercet.router.workers.supervisor import LOAD_BYTES, Started


def main(started: Started) -> None:
    """Serve until told to stop, or until the supervisor is gone."""
    loads = memoryview(mmap.mmap(started.loads, LOAD_BYTES * started.workers)).cast("i")
    with socket.socket(fileno=started.control) as control, socket.socket(fileno=started.listening) as listening:
        line = SupervisorLine(control, lost=lambda: os.kill(os.getpid(), signal.SIGTERM))
        serve(started.config, Shared(line, listening, loads, started.index, started.replaces))


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Started))
