"""The process that imports vLLM once for all workers of a front door, and forks each of them.

See :mod:`tercet.aio.warm_parent`.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from tercet.aio.forked_child import Forks
from tercet.aio.warm_parent import serve_forks

COMMAND = "from tercet.router.warm_workers import main; main()"
IMPORTED = (
    "tercet.router.server",
    "tercet.vllm_plugin.engine.server_access",
    "tercet.vllm_plugin.frontend.served_adapters",
    "uvloop",
)
# Libraries start their threads when they are imported, and no thread survives a fork: so they start none.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


def main() -> None:
    """Import what workers need, and fork them until the supervisor closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's reaches the whole group, and the supervisor decides
    with socket.socket(fileno=int(sys.stdin.readline())) as channel:
        for module in IMPORTED:
            importlib.import_module(module)
        from tercet.vllm_plugin.frontend.openai_server import import_vllm
        from tercet.vllm_plugin.log_noise import errors_only

        errors_only()
        import_vllm()
        serve_forks(channel, _worker)


def _worker(descriptors: list[int]) -> int:
    from tercet.router.workers import work

    settings, line, listening, loads = descriptors
    with open(settings, "rb") as pipe:
        work(pipe.read(), (line, listening, loads))
    return 0


@asynccontextmanager
async def warm_parent(metrics: Path) -> AsyncGenerator[Forks]:
    """A warm parent whose workers write their metrics to ``metrics``."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            env = {**os.environ, **ONE_THREAD, "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
            fd = theirs.fileno()
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", COMMAND, pass_fds=[fd], env=env, stdin=asyncio.subprocess.PIPE
            )
        forks = Forks(ours)
        try:
            assert process.stdin is not None
            process.stdin.write(f"{fd}\n".encode())
            process.stdin.close()
            yield forks
        finally:
            forks.close()
            if process.returncode is None:
                process.kill()
            await process.wait()
