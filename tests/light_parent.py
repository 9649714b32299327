"""One import of what simulated engines and routers need, for all of them that tests start: no vLLM, no torch.

As a module that is run, it is the process that they are forked from; see tercet.cluster.child_process for that of vLLM.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tercet.aio.warm_parent import serve_forks
from tercet.cluster import guard
from tercet.cluster.child_process import ONE_THREAD, be, listening_for_guards

ROOT = Path(__file__).resolve().parents[1]
# Tercet sets it for each engine and router whose model is in a folder, and libraries read it while they are imported.
EARLY = {"HF_HUB_OFFLINE": "1"}
MODULES = (
    "setproctitle",
    "uvloop",
    "tercet.cli.app",
    "tercet.cluster.local",
    "tercet_lab.sim.sim_server",
    "tercet.router.server",
    "tercet_lab.small_openai",
    "tercet.wire.serving.server_access",
)


@contextmanager
def light_parent() -> Generator[Path]:
    """Start the process; gives the address that guards connect to."""
    with listening_for_guards() as (address, listening):
        fd = listening.fileno()
        environment = {**os.environ, **ONE_THREAD, **EARLY}
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, "5", sys.executable, "-m", __name__, str(fd)],
            stdin=subprocess.PIPE, process_group=0, pass_fds=[fd], env=environment, cwd=ROOT,
        )  # fmt: skip
        listening.close()
        try:
            yield address
        finally:
            process.terminate()
            process.communicate(timeout=60)


def main() -> None:
    """Import, then fork until ended."""
    began_with = dict(os.environ)
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        for name in MODULES:
            importlib.import_module(name)
        import setproctitle

        setproctitle.getproctitle()  # it searches the beginning of the environment, before that is changed
        serve_forks(listening, partial(be, began_with))


if __name__ == "__main__":
    main()
