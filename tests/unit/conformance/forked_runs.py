"""Runs of the conformance suite, each forked from one process that has imported the libraries of the suite.

As a script, it is that process: it reads a request from each line of its input, and writes the exit code of the run.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

LIBRARIES = (
    "asyncio",
    "ssl",
    "pytest",
    "grpc.aio",
    "grpc_health.v1.health_pb2_grpc",
    "envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2",
    "envoy.service.ext_proc.v3.external_processor_pb2_grpc",
)
# The suite as somebody has it who has installed it, and no Tercet.
INSTALLED = "import sys; sys.modules['tercet'] = None; from picker_suite.run import main; sys.exit(main())"


class Runs:
    """Starts runs of the suite in a folder; one run at a time."""

    def __init__(self, parent: subprocess.Popen[str]) -> None:
        self._parent = parent

    def run(self, where: Path, options: Sequence[str]) -> tuple[int, str]:
        """Fork a run with ``where`` as its directory; returns its exit code and its output."""
        output = where / "output.txt"
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(json.dumps([str(where), str(output), *options]) + "\n")
        self._parent.stdin.flush()
        return int(self._parent.stdout.readline()), output.read_text()


@contextmanager
def forked_runs() -> Generator[Runs]:
    """Start the process that forks; when this is left, it and its runs are killed."""
    # Without this folder in its path: the suite must not find the modules here.
    command = [sys.executable, "-P", __file__]
    # The only plugin that the suite asks for; to look for all that are installed takes a third of a run.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_asyncio.plugin"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, process_group=0, env=environment) as parent:
        try:
            yield Runs(parent)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def main() -> None:
    """Fork a run for each line of the input."""
    for name in LIBRARIES:
        importlib.import_module(name)
    for line in sys.stdin:
        where, output, *options = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(where, output, options)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(where: str, output: str, options: Sequence[str]) -> None:
    """Run the suite as ``python -c INSTALLED`` does, and end."""
    code = 1
    try:
        os.chdir(where)
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(written, stream)
        sys.path.insert(0, "")
        sys.argv[:] = ["-c", *options]
        exec(INSTALLED, {"__name__": "__main__"})
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
