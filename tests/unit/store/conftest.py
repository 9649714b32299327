"""Agents of stores are forked from a process that has imported them: each one imports for half a second by itself."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import DupFd
from types import SimpleNamespace
from typing import Any

import pytest

from tercet.transport.agent import __main__ as program
from tercet.transport.agent import agent

ABOVE_ALL = 1000  # descriptors that no process here has opened


class Descriptor:
    """A descriptor on its way to a process that is forked."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (DupFd(self._number),)


def _opened(copy: Any) -> int:
    return copy.detach()


def _be_agent(numbers: Sequence[int], descriptors: Sequence[int]) -> None:
    """Run the agent's program, with descriptors of the numbers that it is told."""
    copies = [fcntl.fcntl(each, fcntl.F_DUPFD, ABOVE_ALL) for each in descriptors]
    for number, copy in zip(numbers, copies, strict=True):
        os.dup2(copy, number)
        os.close(copy)
    sys.argv = ["agent", str(numbers[-1])]
    program.main()


class ForkedAgent:
    """An agent, with what :class:`~tercet.transport.agent.agent.AgentProcess` needs of :class:`subprocess.Popen`."""

    def __init__(self, _command: Sequence[str], pass_fds: Sequence[int], **_: Any) -> None:
        copies, context = [Descriptor(number) for number in pass_fds], multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", __name__])
        self._process = context.Process(target=_be_agent, args=(pass_fds, copies), daemon=True)
        self._process.start()
        self.pid, self._over = self._process.pid, threading.Event()
        threading.Thread(target=self._join, daemon=True).start()

    def _join(self) -> None:
        self._process.join()
        self._over.set()

    def wait(self, timeout: float | None = None) -> int:
        if not self._over.wait(timeout):
            raise subprocess.TimeoutExpired("agent", timeout or 0.0)
        return self._process.exitcode or 0

    def kill(self) -> None:
        self._process.kill()


@pytest.fixture(scope="package", autouse=True)
def _forked_agents() -> Iterator[None]:
    names = {name: getattr(subprocess, name) for name in ("TimeoutExpired", "DEVNULL")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent, "subprocess", SimpleNamespace(Popen=ForkedAgent, **names))
        yield
