"""A process that has imported once and forks a child on request: each child has the modules and pays for no import.

The requests come over a Unix socket. A request carries descriptors, and the answer carries the child's pidfd, so that
its signals cannot reach another process that has its number by then. The parent has one thread and no event loop.
What a fork must not share is in :func:`unforkable`, which is asked before each fork.

Messages, one a packet: ``fork`` with descriptors; then ``forked PID`` with a pidfd, or ``refused REASON``; and, when a
child has ended, ``ended PID CODE``.
"""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

FORK = b"fork"
MOST_DESCRIPTORS = 16
MOST_BYTES = 4096


def unforkable(own: Iterable[int]) -> str | None:
    """Why this process may not fork, or None. Of its sockets it may have those in ``own``.

    A child has a copy of every lock but only the thread that forked, so a lock that another thread holds is held in it
    for ever. Two processes that read one socket take each other's bytes. CUDA does not work in a fork of a process
    that has initialised it. Prometheus' files are opened when a metric is first made, and belong to one process.
    """
    tasks = len(os.listdir("/proc/self/task"))
    if threading.active_count() != 1 or tasks != 1:
        return f"it has {threading.active_count()} Python threads and {tasks} threads in all"
    kept = set(own)
    opened = {fd: path for fd, path in _opened().items() if fd not in kept}
    sockets = [fd for fd, path in opened.items() if path.startswith("socket:")]
    if sockets:
        return f"it has open sockets: {sockets}"
    metrics = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if metrics and any(path.startswith(f"{metrics}/") for path in opened.values()):
        return "it has opened files of metrics"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it has initialised CUDA"
    return None


def serve_forks(channel: socket.socket, child: Callable[[list[int]], int]) -> None:
    """Fork at each request a process that runs ``child`` with the descriptors it got and ends with the code returned.

    Returns when the other end of ``channel`` is closed. The children go on: they have to see by themselves that they
    are not needed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's reaches the whole group, and the requester decides
    gc.collect()
    gc.freeze()  # no collector writes to the pages that were imported, so they stay shared
    children = dict[int, int]()  # pids by pidfd
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    try:
        while True:
            for fd, _ in poll.poll():
                if fd != channel.fileno():
                    poll.unregister(fd)
                    _report_end(channel, fd, children.pop(fd))
                elif (pidfd := _answer(channel, children, child)) is None:
                    return
                elif pidfd >= 0:
                    poll.register(pidfd, select.POLLIN)
    except (BrokenPipeError, ConnectionResetError):
        return  # the requester is gone
    finally:
        for fd in children:
            os.close(fd)


def _answer(channel: socket.socket, children: dict[int, int], child: Callable[[list[int]], int]) -> int | None:
    """Do what the next message asks; returns the child's pidfd, -1 without a child, None at the channel's end."""
    message, descriptors, _, _ = socket.recv_fds(channel, MOST_BYTES, MOST_DESCRIPTORS)
    try:
        if not message:
            return None
        reason = unforkable({channel.fileno(), *descriptors})
        if reason is not None:
            channel.send(f"refused {reason}".encode()[:MOST_BYTES])
            return -1
        pid = os.fork()
        if not pid:
            _be_child(channel, list(children), descriptors, child)
        pidfd = os.pidfd_open(pid)
        children[pidfd] = pid
        socket.send_fds(channel, [f"forked {pid}".encode()], [pidfd])
        return pidfd
    finally:
        for fd in descriptors:
            os.close(fd)


def _be_child(
    channel: socket.socket, pidfds: list[int], descriptors: list[int], child: Callable[[list[int]], int]
) -> None:
    """Run ``child`` in a process that has just been forked; it ends here, and never returns."""
    code = 1
    try:
        channel.close()
        for fd in pidfds:
            os.close(fd)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _reseed()
        code = child(descriptors)
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _report_end(channel: socket.socket, pidfd: int, pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    os.close(pidfd)
    channel.send(f"ended {pid} {os.waitstatus_to_exitcode(status)}".encode())


def _reseed() -> None:
    """Children must not draw the same numbers."""
    random.seed()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _opened() -> dict[int, str]:
    """What this process has open beside its standard streams, by descriptor."""
    found = dict[int, str]()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(FileNotFoundError):  # the descriptor that lists them is closed by now
            if fd > 2:
                found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found
