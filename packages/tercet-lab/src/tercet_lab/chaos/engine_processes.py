"""The search for an engine's processes, by their parents and command lines, and the sending of signals to them."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psutil

from tercet.cluster import guard as guard_module
from tercet_lab.chaos.fault_schedule import ProcessKind

AGENT_MODULE = "tercet.transport.agent"
# The title of the process in which a core tries grammars, and of its children.
GRAMMARS_TITLE = "::Grammars"
HELPERS = ("resource_tracker", "forkserver", "semaphore_tracker")
# Kind of process by its depth below the server, which has depth 0.
BY_DEPTH: tuple[ProcessKind, ...] = ("api", "core", "worker", "agent")


class RunningProcess(NamedTuple):
    """A process of a tree."""

    pid: int
    parent: int
    command: str


def classify(server: int, tree: Sequence[RunningProcess]) -> Mapping[ProcessKind, Sequence[int]]:
    """Return the process ids of an engine by kind. ``server`` is the id of its API server.

    The server starts the core, the core starts the workers, and each worker starts an agent. Python's helper processes
    are siblings of them and do not belong to the engine. The core's process for grammars has no separate kind.
    """
    parents = {
        each.pid: each.parent for each in tree if not any(helper in each.command for helper in HELPERS)
    }  # fmt: skip
    grammars = {each.pid for each in tree if GRAMMARS_TITLE in each.command}
    agents = {each.pid for each in tree if AGENT_MODULE in each.command}
    found: defaultdict[ProcessKind, list[int]] = defaultdict(list)
    for pid in sorted({server, *parents}):
        depth, at = 0, pid
        while at != server and at in parents:
            depth, at = depth + 1, parents[at]
        if at == server and pid in grammars:
            found["engine"].append(pid)
        elif at == server:
            found["agent" if pid in agents else BY_DEPTH[min(depth, len(BY_DEPTH) - 1)]].append(pid)
            found["engine"].append(pid)
    return found


def processes_of(guard: int) -> Mapping[ProcessKind, Sequence[int]]:
    """Return the process ids, by kind, of the engine in the process group of ``guard``; empty if it has ended.

    The server's parent is the guard, or the process that forked the server, which is not in the group. The guard's
    watcher is in the group and does not belong to the engine.
    """
    tree: list[RunningProcess] = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if process.pid != guard and os.getpgid(process.pid) == guard:
                command = " ".join(process.cmdline())
                if guard_module.__file__ not in command:
                    tree.append(RunningProcess(process.pid, process.ppid(), command))
    members = {each.pid for each in tree}
    server = next((each.pid for each in tree if each.parent not in members), None)
    return {} if server is None else classify(server, tree)


def send_signal(pids: Sequence[int], number: int) -> int:
    """Send a signal to each process. Return the number of processes that still existed."""
    reached = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            reached += 1
    return reached


def alive(pids: Sequence[int]) -> list[int]:
    """Return the processes that have not ended. A zombie has ended."""
    return [pid for pid in pids if psutil.pid_exists(pid) and _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
