"""Processes that are forked in advance from one that has imported vLLM, and then wait for their task.

If engines compute on CPUs, vLLM starts its core and its workers with ``spawn``: each gets an interpreter, which imports
torch and vLLM again, one after the other. That takes most of an engine's start. Here they are imported once: the
process that becomes the API server imports, and forks the core, which forks the workers, while it still has one thread,
no event loop, no socket and no held lock. The data that vLLM would give a spawned process (the pickled process object,
pipes, the environment) is sent to the waiting process, so no other state of the API server gets into it.

Relies on the protocol between :class:`multiprocessing.process.BaseProcess` and its ``Popen`` (``_bootstrap``,
``duplicate_for_child``, ``sentinel``), which Python's own start methods share.
"""

from __future__ import annotations

import gc
import io
import multiprocessing.context as context
import os
import pickle
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, util
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

import setproctitle

_HEADER = struct.Struct("!IQ")  # number of descriptors, bytes of the task


@dataclass(frozen=True)
class Standby:
    """A child of this process that waits at the other end of ``channel``, and ends when that is closed."""

    pid: int
    channel: socket.socket


_waiting: list[Standby] = []
"""The waiting children of this process, in the order in which they are used."""
_own: socket.socket | None = None
"""The channel of this process. Its parent considers it alive while any process has the channel open."""
_received: list[int] = []


def stand_by(workers: Sequence[frozenset[int]]) -> None:
    """Fork a core that waits for this process, and makes a worker wait on each of these sets of cores."""
    resource_tracker.ensure_running()  # one tracker for all: it removes the shared memory that they leave
    gc.collect()
    gc.freeze()  # imported memory stays shared: the collector does not write to it
    _fork(lambda: [_fork(partial(os.sched_setaffinity, 0, cores)) for cores in workers])


def _fork(prepare: Callable[[], object]) -> None:
    """Fork a process that runs ``prepare`` and then waits for this one."""
    global _own
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        _waiting.append(Standby(pid, ours))
        return
    ours.close()
    for sibling in _waiting:
        sibling.channel.close()
    _waiting.clear()
    if _own is not None:
        _own.close()
    _own = theirs
    code = 1
    try:
        # setproctitle searches the beginning of the environment, so this call comes before a task replaces it; it is
        # not made in the server, whose command line and environment stay unchanged.
        setproctitle.getproctitle()
        prepare()
        code = _serve(theirs)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(channel: socket.socket) -> int:
    """Wait for a task and run it; return the exit code."""
    header = _exactly(channel, _HEADER.size)
    if not header:
        return 0  # no task: this process is not needed
    count, size = _HEADER.unpack(header)
    _received[:] = socket.recv_fds(channel, 1, count)[1]
    environment, process = pickle.loads(_exactly(channel, size))
    os.environ.clear()
    os.environ.update(environment)
    return process._bootstrap(parent_sentinel=channel.fileno())


class _Passed:
    """A descriptor that is passed with a task, by its index."""

    def __init__(self, index: int) -> None:
        self.index = index

    def detach(self) -> int:
        return _received[self.index]


class Popen(popen_spawn_posix.Popen):
    """A ``Popen`` that passes a process object to a waiting child."""

    DupFd: Any = _Passed

    def __init__(self, process: BaseProcess, standby: Standby) -> None:
        self._standby = standby
        self._descriptors: list[int] = []  # in the order of their indexes
        super().__init__(process)

    def duplicate_for_child(self, fd: int) -> int:
        self._descriptors.append(fd)
        return len(self._descriptors) - 1

    def _launch(self, process_obj: BaseProcess) -> None:
        task = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump((dict(os.environ), process_obj), task)
        finally:
            context.set_spawning_popen(None)
        channel = self._standby.channel
        channel.sendall(_HEADER.pack(len(self._descriptors), task.tell()))
        socket.send_fds(channel, [b"\0"], self._descriptors)  # descriptors cannot be sent without a byte
        channel.sendall(task.getbuffer())
        self.pid = self._standby.pid
        self.sentinel = channel.fileno()
        self.finalizer = util.Finalize(self, channel.close)


class _Process(context.SpawnProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        return Popen(process_obj, _waiting.pop(0)) if _waiting else popen_spawn_posix.Popen(process_obj)


class StandbyContext(context.SpawnContext):
    """A ``spawn`` context whose first processes are the waiting children of this process."""

    Process: ClassVar[type[context.SpawnProcess]] = _Process


def _exactly(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            return b""
        parts += part
    return bytes(parts)
