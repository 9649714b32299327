"""One import of vLLM for all engines, routers and commands that tests start: see tercet.cluster.child_process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from unittest.mock import patch

from tercet.cluster import guard
from tercet.cluster.child_process import COMMAND, can_fork, listening_for_guards, loaded_with
from tercet.cluster.engine_command import EngineSpec, engine_env
from tercet.cluster.model import resolve_model
from tercet.settings.process_settings import WARM_PARENT_VARIABLE

MODEL = "smollm2"
GRACE_SECONDS = 10


def spec_of(name: str, port: int, *args: str, model: str = MODEL, core: int = 0, kv_cache_gib: int = 1) -> EngineSpec:
    """An engine on one core, in float32, with flags of vLLM's; engines of this machine may have it prefill."""
    cores = sorted(os.sched_getaffinity(0))
    return EngineSpec(
        name=name,
        model=resolve_model(model),
        served_model_name=MODEL,
        host="127.0.0.1",
        port=port,
        dtype="float32",
        built_in=model == MODEL,
        cores=(cores[core % len(cores)],),
        kv_cache_gib=kv_cache_gib,
        extra_args=args,
        prefill_hosts="127.0.0.1:*",
    )


@contextmanager
def warm_parent(log: Path) -> Generator[None]:
    """While entered, what tests start is forked from one process, as far as it may be.

    Commands that tests start without an environment of their own, as routers, get what the process has imported with.
    """
    engine = spec_of("any", 1)
    engines = engine_env(engine)
    with (
        listening_for_guards() as (address, listening),
        log.open("wb") as output,
        # vLLM does not remove its socket files.
        tempfile.TemporaryDirectory(prefix="sockets-", ignore_cleanup_errors=True) as sockets,
    ):
        given = {guard.SOCKETS: sockets, "HF_HUB_OFFLINE": engines["HF_HUB_OFFLINE"]}
        fd = listening.fileno()
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(GRACE_SECONDS), *COMMAND, str(fd), engine.model],
            stdin=subprocess.PIPE, stdout=output, stderr=output, process_group=0, pass_fds=[fd],
            env={**os.environ, **engines, **loaded_with(), **given},
        )  # fmt: skip
        listening.close()
        try:
            with patch.dict(os.environ, {**given, WARM_PARENT_VARIABLE: str(address)}):
                yield
        finally:
            process.terminate()
            process.communicate(timeout=6 * GRACE_SECONDS)


def start_guarded(argv: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a command that ends at the latest when this process does; by the warm parent, if there is one for it.

    Its process group's id is the returned guard's pid, and its exit code the guard's. SIGTERM to the guard ends it.
    """
    warm = environment.get(WARM_PARENT_VARIABLE)
    forked = [guard.FROM, warm] if warm and can_fork(argv) else []
    command = [sys.executable, "-I", "-S", guard.__file__, str(GRACE_SECONDS), *forked, *argv]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment, process_group=0
    )
