"""Processes that stand by do what spawned ones would, at the same places of the tree, and are never left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tercet.cluster.engine_command import PLAIN_SERVER, WITH_ONE_IMPORT, EngineSpec, engine_argv, plain_argv
from tercet.vllm_plugin.start import server
from tercet.vllm_plugin.start.server import read_once
from tests.longest_wait import wait_until

pytestmark = pytest.mark.processes


def run(what: str) -> Any:
    command = [sys.executable, "-m", "tests.unit.vllm_plugin.standing_by", what]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env=os.environ | {"GIVEN": "at the start"}
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(("what", "code"), [("ends", 5), ("killed", -9)])
def test_a_task_is_done_as_by_a_spawned_process(what: str, code: int) -> None:
    told = run(what)
    assert told["core"]["parent"] == told["server"]["pid"]
    assert told["worker"]["parent"] == told["core"]["pid"]
    assert told["worker"]["told"] == "by the core"
    assert told["worker"]["cores"] == told["computing"]
    assert told["core"]["cores"] == told["server"]["cores"]
    assert told["worker"]["command"][0] == "standing by: worker"
    # Whoever starts an engine anew reads its server's command and environment.
    assert told["server"]["command"][1:-1] == ["-m", "tests.unit.vllm_plugin.standing_by", what]
    assert "GIVEN=at the start" in told["server"]["environment"]
    assert (told["alive"], told["is_told"]) == (True, True)
    assert told["codes"] == [7, code, 0]  # the second one of the server is spawned


def test_a_core_that_dies_is_noticed_while_its_worker_hangs() -> None:
    assert run("left") is True


def test_those_that_nobody_needs_end_with_the_process_that_they_stand_by_for() -> None:
    waiting = run("unused")
    assert len(waiting) == 2
    wait_until(lambda: not [pid for pid in waiting if psutil.pid_exists(pid)])


def test_each_of_several_workers_ends_alone() -> None:
    parents, core, is_told, alive, codes = run("two")
    assert parents == [core, core]
    assert (is_told, alive) == (True, True)
    assert codes == [-9, 0]


# ---- which engines begin so ----------------------------------------------------------------------------------------


def spec(*extra_args: str, **changes: Any) -> EngineSpec:
    fields: dict[str, Any] = {"cores": (0, 1), **changes}
    return EngineSpec(
        name="p", model="/m", served_model_name="m", host="127.0.0.1", port=1, extra_args=extra_args, **fields
    )


def test_an_engine_on_cores_of_its_own_imports_once() -> None:
    assert WITH_ONE_IMPORT in engine_argv(spec(), {})
    assert WITH_ONE_IMPORT in engine_argv(spec("--max-num-seqs", "4"), {})
    assert WITH_ONE_IMPORT in engine_argv(spec("-tp", "2"), {})
    assert PLAIN_SERVER in plain_argv(spec())


@pytest.mark.parametrize(
    ("chosen", "inherited"),
    [
        (spec(cores=(), gpus=("0",)), {}),
        (spec("-pp", "2"), {}),
        (spec("--distributed-executor-backend", "ray"), {}),
        (spec("--no-enforce-eager"), {}),
        (spec("--data-parallel-size=2"), {}),
        (spec(), {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}),
        (spec(), {"LD_PRELOAD": "/usr/lib/libiomp5.so"}),
    ],
)
def test_others_start_as_vllm_starts_them(chosen: EngineSpec, inherited: dict[str, str]) -> None:
    assert engine_argv(chosen, inherited) == plain_argv(chosen)


def test_what_libraries_read_once_is_there_before_they_are_loaded() -> None:
    openmp = Path("/site/torch/lib/libgomp.so.1")
    wanted = read_once({"VLLM_CPU_OMP_THREADS_BIND": "0-2,5"}, openmp)
    assert wanted == {"LD_PRELOAD": str(openmp), "GOMP_CPU_AFFINITY": "0-2 5"}
    again = {"VLLM_CPU_OMP_THREADS_BIND": "0-2,5", **wanted}
    assert read_once(again, openmp) == wanted
    assert read_once({"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, openmp) == {"LD_PRELOAD": str(openmp)}
    beside = read_once({"VLLM_CPU_OMP_THREADS_BIND": "0", "LD_PRELOAD": "/clock.so"}, openmp)
    assert beside["LD_PRELOAD"] == f"/clock.so:{openmp}"


def test_cores_of_workers() -> None:
    assert server.core_groups("0") == [{0}]
    assert server.core_groups("0-2,5|3,7-8") == [{0, 1, 2, 5}, {3, 7, 8}]


def test_it_begins_anew_with_that_environment_and_remembers_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    monkeypatch.setenv(server.THREADS_BIND, "0")
    monkeypatch.setattr(server, "openmp", lambda: None)
    monkeypatch.setattr("os.execve", lambda *call: begun.append(call))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3})
    server.main()
    ((_, argv, environment),) = begun
    assert argv[1:] == sys.orig_argv[1:]
    assert (environment["GOMP_CPU_AFFINITY"], environment["TERCET_ALLOWED_CORES"]) == ("0", "0,3")
