"""A process that has imported modules once and forks children on request. The children need not import them again.

Requests arrive over Unix packet sockets: one channel, or all connections to a listening socket. A request carries
descriptors. The answer carries the child's pidfd, so that a signal cannot reach another process that later gets the
child's number. The parent has one thread and no event loop. Before each fork, :func:`unforkable` checks that the
process has no open descriptors or threads that a fork must not share.

Messages, one per packet: ``fork GROUP`` with descriptors (the child joins that process group; 0: the parent's); the
answer ``forked PID`` with a pidfd, or ``refused REASON``; and, when a child has ended, ``ended PID CODE``.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

FORK = b"fork 0"
MOST_DESCRIPTORS = 16
MOST_BYTES = 4096
ACCEPT_PAUSE_S = 0.1
UNKNOWN = 1
"""The exit code of a child whose parent ended first: its real code is unknown."""


def unforkable(own: Iterable[int]) -> str | None:
    """Return the reason why this process must not fork, or None. ``own``: descriptors of sockets that it may have open.

    A child has a copy of every lock but only the thread that forked: a lock that another thread holds stays locked in
    the child for ever. Two processes that read one socket take each other's bytes. CUDA does not work in a fork of a
    process that has initialised it. Prometheus opens its files when a metric is first made, and a file belongs to one
    process.
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
        return "it has open metrics files"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it has initialised CUDA"
    return None


def serve_forks(requests: socket.socket, child: Callable[[list[int]], int]) -> None:
    """Fork a process at each request. It runs ``child`` with the received descriptors and ends with the returned code.

    ``requests`` is a channel, and this function returns when its other end is closed; or it is a listening socket, and
    each connection to it is a channel. The children continue after that: each must notice by itself that it is not
    needed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group, and the requester decides
    gc.collect()
    gc.freeze()  # the collector writes to no imported pages then, so they stay shared
    parent = _Parent(child)
    try:
        if requests.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            parent.listen(requests)
        else:
            parent.add(requests)
        while parent.is_open:
            parent.do_what_is_asked()
    finally:
        parent.close()


class _Parent:
    """State of the warm parent: its channels, and its children by pidfd, each with the channel that requested it."""

    def __init__(self, child: Callable[[list[int]], int]) -> None:
        self._child = child
        self._listening: socket.socket | None = None
        self._channels = dict[int, socket.socket]()
        self._children = dict[int, tuple[int, int]]()  # pid and channel
        self._poll = select.poll()

    @property
    def is_open(self) -> bool:
        return self._listening is not None or bool(self._channels)

    def listen(self, listening: socket.socket) -> None:
        self._listening = listening
        self._poll.register(listening, select.POLLIN)

    def add(self, channel: socket.socket) -> None:
        channel.setblocking(True)
        self._channels[channel.fileno()] = channel
        self._poll.register(channel, select.POLLIN)

    def do_what_is_asked(self) -> None:
        for fd, _ in self._poll.poll():
            if fd in self._children:
                self._report_end(fd)
            elif fd in self._channels:
                self._answer(self._channels[fd])
            elif self._listening is not None:
                self._accept(self._listening)

    def _accept(self, listening: socket.socket) -> None:
        try:
            self.add(listening.accept()[0])
        except OSError:  # the caller has left, or a descriptor is missing: the poll then returns at once, every time
            time.sleep(ACCEPT_PAUSE_S)

    def close(self) -> None:
        for pidfd in self._children:
            os.close(pidfd)
        for channel in self._channels.values():
            channel.close()

    def _answer(self, channel: socket.socket) -> None:
        descriptors: list[int] = []
        try:
            message, descriptors, _, _ = socket.recv_fds(channel, MOST_BYTES, MOST_DESCRIPTORS)
            if not message:
                self._drop(channel)
                return
            self._fork(channel, int(message.split()[1]), descriptors)
        except (BrokenPipeError, ConnectionResetError):
            self._drop(channel)
        finally:
            for fd in descriptors:
                os.close(fd)

    def _fork(self, channel: socket.socket, group: int, descriptors: list[int]) -> None:
        own = [*self._channels, *self._children]
        if self._listening is not None:
            own.append(self._listening.fileno())
        reason = unforkable([*own, *descriptors]) or _unjoinable(group)
        if reason is not None:
            channel.send(f"refused {reason}".encode()[:MOST_BYTES])
            return
        # The child waits at this pipe until its requester has got the pidfd. Without it, a requester that disconnects
        # between fork and answer would leave a child that runs a command which the requester starts again.
        reported, report = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(report)
            _be_child(group, own, descriptors, partial(_once_reported, reported, self._child))
        os.close(reported)
        # The number cannot be another process's yet: only this process waits for the child.
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = pid, channel.fileno()
        self._poll.register(pidfd, select.POLLIN)
        if group:  # the child does so, too: neither needs to wait for the other
            with suppress(ProcessLookupError, PermissionError):
                os.setpgid(pid, group)
        try:
            socket.send_fds(channel, [f"forked {pid}".encode()], [pidfd])
            with suppress(BrokenPipeError):  # the child was killed
                os.write(report, b"\n")
        except OSError:
            os.kill(pid, signal.SIGKILL)  # its requester has disconnected, and would not see it end
            raise
        finally:
            os.close(report)

    def _report_end(self, pidfd: int) -> None:
        pid, asked = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        channel = self._channels.get(asked)
        if channel is not None:
            try:
                channel.send(f"ended {pid} {os.waitstatus_to_exitcode(status)}".encode())
            except (BrokenPipeError, ConnectionResetError):
                self._drop(channel)

    def _drop(self, channel: socket.socket) -> None:
        """Close a channel. The ends of its children are not reported to a later channel with the same number."""
        fd = channel.fileno()
        self._poll.unregister(fd)
        del self._channels[fd]
        channel.close()
        for pidfd, (pid, asked) in self._children.items():
            if asked == fd:
                # The descriptor's number may be given to the next channel, which did not request these children.
                self._children[pidfd] = pid, -1


def _be_child(group: int, others: Collection[int], descriptors: list[int], child: Callable[[list[int]], int]) -> None:
    """Run ``child`` in a process that has just been forked, and end the process: this function never returns.

    ``others`` are the parent's descriptors, which are closed here.
    """
    code = 1
    try:
        # A channel that a child kept open would hide the parent's end from its requesters.
        for fd in others:
            os.close(fd)
        if group:
            os.setpgid(0, group)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Children must not draw the same numbers.
        random.seed()
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed()
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
            # Neither exit handlers nor destructors run here: they belong to the parent, and would close what it uses.
            os._exit(code)


def _once_reported(reported: int, child: Callable[[list[int]], int], descriptors: list[int]) -> int:
    """Run ``child`` after its requester was notified of the fork: one that is not starts the command again."""
    if not os.read(reported, 1):
        return 1
    os.close(reported)
    return child(descriptors)


def _unjoinable(group: int) -> str | None:
    """Return the reason why a child of this process cannot join process group ``group``, or None."""
    try:
        if group and os.getsid(group) != os.getsid(0):
            return "it is in another session"
    except ProcessLookupError:
        return f"process group {group} has ended"
    return None


def _opened() -> dict[int, str]:
    """Return the open descriptors of this process with their targets; standard streams are left out."""
    found = dict[int, str]()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(FileNotFoundError):  # the descriptor that was used to list them is closed by now
            if fd > 2:
                found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found


# ---- the requester's end ---------------------------------------------------------------------------------------


class NoFork(Exception):
    """Error: the warm parent has ended or refuses to fork. The message has the reason."""


class ForkedChild:
    """A child of the warm parent, with those methods of :class:`asyncio.subprocess.Process` that the router needs."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = pidfd
        self._code = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        """Return the child's exit code, or -N if signal N ended it."""
        return await asyncio.shield(self._code)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def ended(self, code: int) -> None:
        """Record the child's exit code, and close its descriptor."""
        if self.returncode is None:
            self.returncode = code
            os.close(self._pidfd)
            self._code.set_result(code)

    def orphaned(self) -> None:
        """Watch the pidfd for the child's end: the warm parent has ended and cannot report it."""
        loop = asyncio.get_running_loop()

        def over() -> None:
            loop.remove_reader(self._pidfd)
            self.ended(UNKNOWN)

        loop.add_reader(self._pidfd, over)

    def _signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._pidfd, number)


class Forks:
    """The channel to a warm parent. Call :meth:`close` after all children have ended."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._children = dict[int, ForkedChild]()
        self._asked: list[asyncio.Future[ForkedChild]] = []  # in the order of the answers
        self._gone = False
        channel.setblocking(False)
        asyncio.get_running_loop().add_reader(channel, self._receive)

    async def fork(self, descriptors: Sequence[int]) -> ForkedChild:
        """Fork a child that has copies of ``descriptors``. Raise :class:`NoFork` if that is not possible."""
        if self._gone:
            raise NoFork("the process that forks workers has ended")
        try:
            socket.send_fds(self._channel, [FORK], list(descriptors))
        except OSError as error:
            raise NoFork(str(error)) from error
        answer = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            # The request cannot be taken back: the child is killed once its number is known.
            answer.add_done_callback(lambda late: late.exception() or late.result().kill())
            raise

    def close(self) -> None:
        """Close the channel. The warm parent then ends."""
        self._lose("the router is shutting down")
        self._channel.close()

    def _receive(self) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._channel, MOST_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            message, descriptors = b"", []
        word, _, rest = message.decode().partition(" ")
        if word == "forked":
            child = self._children[int(rest)] = ForkedChild(int(rest), descriptors[0])
            self._asked.pop(0).set_result(child)
        elif word == "refused":
            self._asked.pop(0).set_exception(NoFork(rest))
        elif word == "ended":
            pid, code = map(int, rest.split())
            self._children.pop(pid).ended(code)
        else:
            self._lose("the process that forks workers has ended")

    def _lose(self, reason: str) -> None:
        if self._gone:
            return
        self._gone = True
        asyncio.get_running_loop().remove_reader(self._channel)
        for answer in self._asked:
            answer.set_exception(NoFork(reason))
        self._asked.clear()
        for child in self._children.values():
            child.orphaned()
        self._children.clear()
