"""A process with a core and a worker that stand by, as an engine has them: ``python -m ... WHAT``; prints JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import setproctitle

from tercet.vllm_plugin.start.standby import StandbyContext, stand_by
from tests.longest_wait import LONGEST_WAIT_S


def told(role: str) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    command, environment = (Path(f"/proc/self/{name}").read_text().split("\0") for name in ("cmdline", "environ"))
    seen = {"command": command, "environment": environment}
    return {
        **seen,
        "role": role,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "told": os.environ.get("TOLD"),
        "cores": cores,
    }


def worker(answers: Connection, end: Connection, lock: Any) -> None:
    setproctitle.setproctitle("standing by: worker")
    with lock:
        answers.send(told("worker"))
    if os.environ["LEFT"]:
        time.sleep(60)  # as one that hangs, and does not see that its core is gone
    end.recv()
    sys.exit(7)


def two_workers(answers: Connection) -> None:
    """Their parents and exit codes: the first is killed while the second one goes on."""
    context = StandbyContext()
    ending, ended = context.Pipe(duplex=False)
    processes = [context.Process(target=ending.recv), context.Process(target=ending.recv)]
    for process in processes:
        process.start()
    parents = [psutil.Process(process.pid).ppid() for process in processes]
    os.kill(processes[0].pid or 0, signal.SIGKILL)
    is_told = bool(wait([processes[0].sentinel], timeout=LONGEST_WAIT_S))
    alive = processes[1].is_alive()
    ended.send(None)
    for process in processes:
        process.join(LONGEST_WAIT_S)
    answers.send([parents, os.getpid(), is_told, alive, [process.exitcode for process in processes]])


def core(answers: Connection, end: Connection) -> None:
    context = StandbyContext()
    os.environ["TOLD"] = "by the core"
    reading, writing = context.Pipe(duplex=False)
    ending, ended = context.Pipe(duplex=False)
    lock = context.Lock()
    process = context.Process(target=worker, args=(writing, ending, lock), daemon=True)
    process.start()
    answers.send([told("core"), reading.recv()])
    if os.environ["LEFT"]:
        end.recv()
    ended.send(None)
    process.join()
    answers.send(process.exitcode)
    end.recv()
    sys.exit(5)


def main(what: str) -> None:
    computing = frozenset({min(os.sched_getaffinity(0))})
    stand_by([computing] * (2 if what == "two" else 1))
    context = StandbyContext()
    if what == "unused":
        while len(waiting := children_of(os.getpid())) < 2:  # the core forks the worker after it has been forked
            time.sleep(0.01)
        print(json.dumps(waiting))
        return
    if what == "two":
        reading, writing = context.Pipe(duplex=False)
        process = context.Process(target=two_workers, args=(writing,))
        process.start()
        print(json.dumps(reading.recv()))
        process.join(LONGEST_WAIT_S)
        return
    os.environ["TOLD"] = "by the server"
    os.environ["LEFT"] = "yes" if what == "left" else ""
    reading, writing = context.Pipe(duplex=False)
    ending, ended = context.Pipe(duplex=False)
    process = context.Process(target=core, args=(writing, ending))
    process.start()
    core_told, worker_told = reading.recv()
    if what == "left":
        process.kill()
        is_told = bool(wait([process.sentinel], timeout=LONGEST_WAIT_S))
        os.kill(worker_told["pid"], signal.SIGKILL)
        print(json.dumps(is_told))
        return
    worker_code, alive = reading.recv(), process.is_alive()
    if what == "killed":
        os.kill(process.pid or 0, signal.SIGKILL)
    else:
        ended.send(None)
    is_told = bool(wait([process.sentinel], timeout=LONGEST_WAIT_S))
    process.join(LONGEST_WAIT_S)
    another = context.Process(target=time.time)
    another.start()
    another.join(60)
    print(
        json.dumps(
            {
                "server": told("server"), "core": core_told, "worker": worker_told, "computing": sorted(computing),
                "codes": [worker_code, process.exitcode, another.exitcode], "alive": alive, "is_told": is_told,
            }
        )
    )  # fmt: skip


def children_of(pid: int) -> list[int]:
    return [each.pid for each in psutil.Process(pid).children(recursive=True) if "tracker" not in str(each.cmdline())]


if __name__ == "__main__":
    main(sys.argv[1])
