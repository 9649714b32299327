"""A worker's process: a front door that shares its port, and a line that ends when its supervisor does."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
import sys
from dataclasses import dataclass

import msgspec

from tercet.settings import RouterConfig

LOAD_BYTES = 4
SERVING = b"serving"


class Started(msgspec.Struct, frozen=True):
    """What a worker reads from its standard input: its place, and the file descriptors that it inherits."""

    config: RouterConfig
    index: int
    line: int
    listening: int
    loads: int


@dataclass(frozen=True)
class Shared:
    """What a worker has in common with others: the port, each one's number of connections, and the supervisor."""

    index: int
    listening: socket.socket
    loads: memoryview[int]
    line: socket.socket

    def serving(self) -> None:
        """Tell the supervisor that this worker takes connections."""
        self.line.sendall(SERVING)

    async def until_supervisor_ends(self) -> None:
        """Then nobody would replace this worker, or stop it: it stops itself."""
        self.line.setblocking(False)
        while await asyncio.get_running_loop().sock_recv(self.line, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Serve until told to stop, or until the supervisor is gone."""
    from tercet.router.server import serve

    started = msgspec.json.decode(sys.stdin.buffer.read(), type=Started)
    loads = memoryview(mmap.mmap(started.loads, LOAD_BYTES * started.config.workers)).cast("i")
    with socket.socket(fileno=started.line) as line, socket.socket(fileno=started.listening) as listening:
        serve(started.config, Shared(started.index, listening, loads, line))
