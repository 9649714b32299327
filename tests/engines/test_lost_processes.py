"""`tercet engine` alone, without anything above it: whichever of its processes is killed, all of them end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.small_llama import small_llama

from .conftest import START_SECONDS, answers, free_port
from .processes import part_of, processes_of

pytestmark = pytest.mark.verifies("failures of engines")

ENDS_WITHIN_SECONDS = 60.0


@pytest.mark.parametrize("killed", ["server", "core"])
def test_all_processes_end_with_one(tmp_path: Path, killed: str) -> None:
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", tmp_path / "engine.log"
    command = [
        sys.executable, "-m", "tercet.cli", "engine", "--model", str(small_llama()), "--served-model-name", "smollm2",
        "--port", str(port), "--dtype", "float32", "--", "--max-model-len", "1024", "--enforce-eager",
    ]  # fmt: skip
    below: list[psutil.Process] = []
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as engine:
        try:
            deadline = time.monotonic() + START_SECONDS
            while not answers(f"{url}/health"):
                assert engine.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            below = processes_of(url)[1:]
            (victim,) = processes_of(url)[:1] if killed == "server" else part_of(url, "core")
            victim.send_signal(signal.SIGKILL)
            assert engine.wait(ENDS_WITHIN_SECONDS) != 0
            _, alive = psutil.wait_procs(below, timeout=ENDS_WITHIN_SECONDS)
            assert not alive
            assert f"the process {victim.pid}, which started" in log.read_text()
        finally:
            for each in [engine, *below]:
                try:
                    each.kill()
                except (psutil.NoSuchProcess, ProcessLookupError):
                    continue
