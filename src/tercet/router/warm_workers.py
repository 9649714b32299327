"""The warm parent: a process that imports vLLM once for all workers of a router, and forks each of them.

See :mod:`tercet.aio.warm_parent`. A supervisor that was forked with vLLM imported forks this process too.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tercet.aio.warm_parent import serve_forks, unforkable

METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
COMMAND = "from tercet.router.warm_workers import main; main()"
IMPORTED = (
    "tercet.router.server",
    "tercet.wire.serving.server_access",
    "tercet.router.openai.openai_server",
    "uvloop",
)
# Makes libraries start no threads at their import, since threads do not survive a fork.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


def main() -> None:
    """Import the modules that workers need, and fork workers until the supervisor closes its end."""
    _leave_signals_to_the_supervisor()
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        from tercet.vllm_plugin.start.before_forks import light_import

        with light_import(compiles=False):
            for module in IMPORTED:
                importlib.import_module(module)
            from tercet.router.openai.openai_server import import_vllm
            from tercet.vllm_plugin.start.process_output import errors_only

            errors_only()
            import_vllm()
        serve_forks(channel, _worker)


def _worker(descriptors: list[int]) -> int:
    from tercet.router.workers import work

    settings, line, listening, loads = descriptors
    with open(settings, "rb") as pipe:
        work(pipe.read(), (line, listening, loads))
    return 0


@contextmanager
def warm_parent(metrics: Path) -> Generator[socket.socket]:
    """Start a warm parent, yield the channel to it, and stop it at the exit; call this before an event loop runs.

    Its workers write their metrics to ``metrics``.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            variables = {METRICS_VARIABLE: str(metrics)}
            # A fork of this process saves the import of vLLM once more; it must have no threads, which a fork loses.
            has_imported = "vllm" in sys.modules and unforkable([ours.fileno(), theirs.fileno()]) is None
            if has_imported:
                stop = _forked(ours, theirs, variables)
            else:
                fd = theirs.fileno()
                process = subprocess.Popen(
                    [sys.executable, "-c", COMMAND, str(fd)],
                    pass_fds=[fd],
                    env={**os.environ, **ONE_THREAD, **variables},
                )

                def stop() -> None:
                    process.kill()
                    process.wait()

        try:
            yield ours
        finally:
            stop()


def _forked(ours: socket.socket, channel: socket.socket, variables: Mapping[str, str]) -> Callable[[], None]:
    """Fork this process, which has imported vLLM, into a warm parent; return the function that stops it."""
    pid = os.fork()
    if pid:

        def stop() -> None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

        return stop
    # The child never returns into the caller's stack, whose contexts the supervisor leaves itself.
    code = 1
    try:
        _leave_signals_to_the_supervisor()
        # Without this the channel would stay open when the supervisor is gone, and this process would never end.
        ours.close()
        os.environ.update(variables)
        # Make Prometheus keep metrics in files; it chose otherwise when it was imported.
        values: Any = importlib.import_module("prometheus_client.values")
        values.ValueClass = values.get_value_class()
        serve_forks(channel, _worker)
        code = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(code)


def _leave_signals_to_the_supervisor() -> None:
    """Ignore signals, which reach the whole group: this process ends when the supervisor closes its end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
