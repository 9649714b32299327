"""A killed process of an engine takes the others along, with a line that says which, and an exit code that is not 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.longest_wait import LONGEST_WAIT_S

pytestmark = [pytest.mark.processes, pytest.mark.slow]

# Three processes, each of which started the next one with `spawn`, as the API server, the core and the worker do.
CHAIN = """
import logging, multiprocessing, os, signal, sys, time
from tercet.vllm_plugin import register

def run(depth, stubborn):
    logging.basicConfig()
    register.CLEAN_UP_SECONDS = 0.2
    register.end_with_parent()
    register.end_with_parent()
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid(), flush=True)
    if depth:
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=run, args=(depth - 1, stubborn), name=f"Part-{depth}")
        child.start()
    time.sleep(600)

if __name__ == "__main__":
    run(2, sys.argv[1] == "stubborn")
"""


@pytest.mark.parametrize("how", ["soft", "stubborn"])
def test_all_that_a_killed_process_has_started_ends(tmp_path: object, how: str) -> None:
    file = os.path.join(str(tmp_path), "chain.py")
    with open(file, "w") as written:
        written.write(CHAIN)
    with subprocess.Popen(
        [sys.executable, file, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        pids = [int(first.stdout.readline()) for _ in range(3)]
        below = [psutil.Process(pid) for pid in pids[1:]]
        first.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(below, timeout=LONGEST_WAIT_S)
        assert not alive
        _, said = first.communicate(timeout=LONGEST_WAIT_S)
        assert f"the process {pids[0]}, which started Part-2, was lost" in said
        assert first.returncode == -signal.SIGKILL


def test_the_server_of_a_lost_core_fails() -> None:
    code = """
import atexit
from tercet.engine.edge import fail_at_exit
atexit.register(print, "earlier ones run")
fail_at_exit("its core was lost")
print("served")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "served\nearlier ones run\n")
    assert "the engine ends with exit code 1: its core was lost" in done.stderr
