"""Client of :mod:`.warm_parent`: asks it to fork children, and waits until they end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress

from tercet.aio.warm_parent import FORK, MOST_BYTES

UNKNOWN = 1
"""The exit code of a child whose parent ended first: its real code is unknown."""


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
            answer.add_done_callback(_kill_unwanted)
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


def _kill_unwanted(answer: asyncio.Future[ForkedChild]) -> None:
    with suppress(NoFork):
        answer.result().kill()
