"""One import of vLLM for all processes of a fleet on this machine: ``python -m tercet.cluster.warm_start FD [MODEL]``.

This process imports the modules that routers and engines on CPU cores need, compares vLLM with Tercet's hooks, and
loads the tokenizer of ``MODEL`` if that is a directory. The guard (:mod:`tercet.cluster.guard`) of a command asks it
for a fork, and waits. The fork has the command's arguments, environment, directory and output.
Variables that the interpreter and libraries read during their import cannot be changed later: a fork that needs another
value of such a variable runs its command instead, which imports the modules itself.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import runpy
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tercet.aio.importing import without_collections
from tercet.aio.warm_parent import serve_forks
from tercet.cluster.child_process import Process
from tercet.cluster.engine_command import WITH_ONE_IMPORT
from tercet.settings.process_settings import NO_DYNAMO, PRELOAD, THREADS_BIND

COMMAND = (sys.executable, "-m", "tercet.cluster.warm_start")
COMMAND_LINE = "tercet.cli"
# Modules that a router imports in addition to engines' modules.
OF_ROUTER = (
    "tercet.cli.app",
    "tercet.router.server",
    "tercet.wire.serving.server_access",
    "tercet.router.openai.openai_server",
    "uvloop",
)
# Some libraries start threads during their import, and threads do not survive a fork: they must not start any.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
READ_LATE = frozenset({
    "VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE", THREADS_BIND, "VLLM_NO_USAGE_STATS", "VLLM_PLUGINS",
    "VLLM_LOGGING_LEVEL", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "PWD", "OLDPWD", "SHLVL",
    "_", "PYTEST_CURRENT_TEST", "VLLM_RPC_BASE_PATH", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", PRELOAD,
    *ONE_THREAD,
})  # fmt: skip
"""Variables that are read after a fork; those with a prefix of :data:`LATE_PREFIXES` are read after it too.

``LD_PRELOAD`` is one of them, since the warm parent has the command's value and PyTorch's OpenMP in addition.
"""
LATE_PREFIXES = ("TERCET_", "OTEL_EXPORTER_OTLP_", "OTEL_TRACES_", "OTEL_BSP_")
"""Prefixes of further variables that are read after a fork: span exporters are created when a process serves."""
OF_ENGINES = frozenset({
    "OMP_NUM_THREADS", "PYTHONWARNINGS", NO_DYNAMO, "TORCH_CPP_LOG_LEVEL",
})  # fmt: skip
"""Variables that matter to engines only: a router computes nothing."""


class ForkedCommand(msgspec.Struct, frozen=True):
    """A guard's request: arguments including the interpreter, environment and working directory."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str


def main() -> None:
    """Import the modules, then fork on request until the process ends."""
    import setproctitle  # vLLM's dependency: without it nothing is imported for engines

    setproctitle.getproctitle()  # it must read the environment before that changes
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        from tercet.vllm_plugin.hooks import SIDES
        from tercet.vllm_plugin.start.before_forks import check_hooks, load_tokenizer
        from tercet.vllm_plugin.start.process_output import without_noise
        from tercet.vllm_plugin.start.server import import_engine

        began_with = dict(os.environ)
        without_noise()
        import_engine()
        with without_collections():
            for module in OF_ROUTER:
                importlib.import_module(module)
            check_hooks(*SIDES)
            for model in sys.argv[2:]:
                load_tokenizer(Path(model))
        serve_forks(listening, partial(be, began_with))


def be(began_with: Mapping[str, str], descriptors: list[int]) -> int:
    """Run the command of a request in this fork; the warm parent started with the variables ``began_with``.

    The descriptors are the request and the three standard streams.
    """
    from tercet.vllm_plugin.start.before_forks import forget_changed_tokenizer

    with open(descriptors[0], "rb") as request:
        command = msgspec.json.decode(request.read(), type=ForkedCommand)
    for stream, fd in enumerate(descriptors[1:]):
        os.dup2(fd, stream)
        os.close(fd)
    module = command.argv[2]
    others = early_differences(began_with, command.env, READ_LATE | OF_ENGINES if module == COMMAND_LINE else READ_LATE)
    os.chdir(command.cwd)
    if others:
        print(
            f"tercet: starting without shared imports: the process needs other values of {', '.join(others)}",
            flush=True,
        )
        os.execve(command.argv[0], command.argv, command.env)
    set_by_imports = {name: value for name, value in os.environ.items() if began_with.get(name) != value}
    os.environ.clear()
    os.environ.update({**command.env, **set_by_imports})
    forget_changed_tokenizer()
    sys.argv[:] = command.argv[2:]
    sys.orig_argv[:] = command.argv
    setproctitle: Any = sys.modules["setproctitle"]
    setproctitle.setproctitle(" ".join(command.argv))
    if module == WITH_ONE_IMPORT:
        from tercet.vllm_plugin.start.server import serve_imported

        os.environ[PRELOAD] = began_with[PRELOAD]
        serve_imported()
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def can_fork(argv: Sequence[str]) -> bool:
    """True if a warm parent has imported the modules of this command."""
    return list(argv[1:3]) in (["-m", WITH_ONE_IMPORT], ["-m", COMMAND_LINE])


def early_differences(here: Mapping[str, str], wanted: Mapping[str, str], late: frozenset[str]) -> list[str]:
    """Return the names of variables that differ and are not in ``late``."""
    names = {*here, *wanted} - late
    return sorted(name for name in names if not name.startswith(LATE_PREFIXES) and here.get(name) != wanted.get(name))


@asynccontextmanager
async def warm_parent(env: Mapping[str, str | None], model: str, log: Path) -> AsyncGenerator[Path]:
    """Run a warm parent for engines with ``model`` and the environment ``env``, and yield the path of its socket.

    Requests may be sent at once: they are answered after the import. Raises :class:`OSError`.
    """
    with listening_for_guards() as (address, listening):
        fd = listening.fileno()
        parent = Process("imports", [*COMMAND, str(fd), model], {**env, **loaded_with()}, log, inherited=(fd,))
        try:
            await parent.start()
            listening.close()
            yield address
        finally:
            await asyncio.shield(parent.stop())


@contextmanager
def listening_for_guards() -> Generator[tuple[Path, socket.socket]]:
    """Yield a socket that guards connect to and that a warm parent inherits, with its path.

    The caller closes its copy of the socket, so that guards notice the end of the warm parent.
    """
    directory = Path(tempfile.mkdtemp(prefix="tercet-warm-"))  # only this user may open it, since clients run commands
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(str(directory / "socket"))
            listening.listen(128)
            yield directory / "socket", listening
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def loaded_with() -> dict[str, str]:
    """Return the variables of a warm parent's environment in addition to those of its engines."""
    from tercet.vllm_plugin.start.server import openmp, with_openmp

    return {**ONE_THREAD, PRELOAD: with_openmp(os.environ.get(PRELOAD, ""), openmp())}


if __name__ == "__main__":
    main()
