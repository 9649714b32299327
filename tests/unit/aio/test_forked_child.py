"""The requester's end of a warm parent: children are waited for, also without their parent, and refusals are raised."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from tercet.aio.warm_parent import UNKNOWN, Forks, NoFork
from tests.longest_wait import LONGEST_WAIT_S

# A child does as the descriptor's text says.
PARENT = """
import os, socket, sys, threading, time
from tercet.aio.warm_parent import serve_forks
%s
with socket.socket(fileno=int(sys.argv[1])) as channel:
    serve_forks(channel, lambda fds: eval(os.read(fds[0], 1000).decode()))
"""


@asynccontextmanager
async def forking(before: str = "") -> AsyncGenerator[tuple[Forks, asyncio.subprocess.Process]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PARENT % before, str(theirs.fileno()), pass_fds=[theirs.fileno()]
        )
    forks = Forks(ours)
    try:
        async with asyncio.timeout(LONGEST_WAIT_S):
            yield forks, process
    finally:
        forks.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


def task(text: str) -> socket.socket:
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(text.encode())
    return theirs


async def runs(child_says: socket.socket) -> None:
    """Return when a child that was told to write to its task's descriptor has done so."""
    child_says.setblocking(False)
    assert await asyncio.get_running_loop().sock_recv(child_says, 1)


async def test_exit_codes_and_signals() -> None:
    async with forking() as (forks, _):
        with task("7") as seven, task("time.sleep(60)") as long:
            first, second = await asyncio.gather(forks.fork([seven.fileno()]), forks.fork([long.fileno()]))
        assert await first.wait() == 7
        first.kill()  # it has ended: no other process is reached
        second.terminate()
        assert await second.wait() == -signal.SIGTERM


async def test_without_its_parent_a_child_is_still_watched_and_no_other_is_forked() -> None:
    async with forking() as (forks, parent):
        ours, long = socket.socketpair()
        with ours, long:
            ours.sendall(b"os.write(fds[0], b'.') and time.sleep(60)")
            child = await forks.fork([long.fileno()])
            await runs(ours)  # a child that is reported and not told yet to run ends with its parent
            parent.kill()
            await parent.wait()
            with pytest.raises(NoFork):
                await forks.fork([long.fileno()])
        assert child.returncode is None
        child.kill()
        assert await child.wait() == UNKNOWN


async def test_a_refusal_says_why() -> None:
    async with forking("threading.Thread(target=time.sleep, args=(60,), daemon=True).start()") as (forks, _):
        with task("0") as nothing, pytest.raises(NoFork, match="threads"):
            await forks.fork([nothing.fileno()])
