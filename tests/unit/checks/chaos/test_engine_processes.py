"""Which process of an engine is which."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tercet_checks.chaos.real_fleet import RunningProcess, alive, classify, processes_of, send_signal

pytestmark = pytest.mark.processes

TREE = [
    RunningProcess(10, 1, "python -m vllm.entrypoints.openai.api_server"),
    RunningProcess(11, 10, "python -c from multiprocessing.resource_tracker import main"),
    RunningProcess(12, 10, "VLLM::EngineCore"),
    RunningProcess(15, 12, "VLLM::Worker_TP0"),
    RunningProcess(16, 12, "VLLM::Worker_TP1"),
    RunningProcess(17, 15, "python -m tercet.transport.agent 3"),
    RunningProcess(9, 16, "python -m tercet.transport.agent 4"),
    RunningProcess(19, 12, "VLLM::Grammars"),
    RunningProcess(20, 19, "VLLM::Grammars"),
    RunningProcess(18, 12, "python -c from multiprocessing.resource_tracker import main"),
]


def test_an_engine_of_two_ranks() -> None:
    found = classify(10, TREE)
    assert found["api"] == [10]
    assert found["core"] == [12]
    assert sorted(found["worker"]) == [15, 16]
    assert sorted(found["agent"]) == [9, 17]
    assert found["engine"] == [9, 10, 12, 15, 16, 17, 19, 20]


def test_a_simulated_engine_is_one_process() -> None:
    found = classify(10, TREE[:1])
    assert dict(found) == {"api": [10], "engine": [10]}


def test_of_a_guard_that_is_gone_there_is_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert processes_of(process.pid) == {}
    assert alive([process.pid]) == []
    assert send_signal([process.pid], 9) == 0


def test_processes_are_found_below_their_guard_and_a_zombie_is_not_alive() -> None:
    inner = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", inner], stdin=subprocess.PIPE, process_group=0) as guard:
        try:
            while not (found := processes_of(guard.pid)):
                pass
            (server,) = found["api"]
            assert alive([server, guard.pid]) == [server, guard.pid]
            assert send_signal([server], 9) == 1
        finally:
            guard.kill()
    assert alive([guard.pid]) == []


@pytest.mark.parametrize("count", [1, 3])
def test_order_does_not_matter(count: int) -> None:
    assert classify(10, TREE[count:] + TREE[:count])["engine"] == classify(10, TREE)["engine"]
