"""The line between a worker and its supervisor: who has ended is noticed, whoever else holds the line."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tercet.aio.warm_parent import Forks, NoFork
from tercet.cluster.ports import free_ports
from tercet.router import workers
from tercet.router.workers import Shared, WorkerSlot
from tercet.settings import EngineAddress, RouterConfig
from tercet.settings.process_settings import COLD, WARM_PARENT_VARIABLE
from tests.longest_wait import LONGEST_WAIT_S, wait_until

CONFIG = RouterConfig(engines=(EngineAddress("e", "http://e"),))


@pytest.fixture
def loads() -> Iterator[int]:
    loads = os.memfd_create("loads")
    os.ftruncate(loads, workers.LOAD_BYTES)
    yield loads
    os.close(loads)


@pytest.mark.parametrize("says", [True, False])
async def test_a_worker_has_ended_when_its_process_has(
    says: bool, loads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "child"
    said = f"os.write(line, {workers.SERVING!r})" if says else "None"
    monkeypatch.setattr(
        workers,
        "COMMAND",
        f"""
import json, os, sys, time
line = json.load(sys.stdin)["line"]
{said}
child = os.fork()
if not child:
    time.sleep(600)
open({str(held)!r}, "w").write(str(child))
os._exit(3)
""",
    )
    with socket.socket() as listening:
        serving: list[int] = []
        place = WorkerSlot(CONFIG, 0, listening, loads, tmp_path, asyncio.Event(), on_serving=serving.append)
        try:
            async with asyncio.timeout(LONGEST_WAIT_S):
                assert await place._one() == (3, says)
            assert serving == [0] * says
        finally:
            os.kill(int(held.read_text()), signal.SIGKILL)


async def test_a_line_that_breaks_is_the_supervisors_end(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(os, "kill", lambda _, number: told.append(number))
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        line = socket.create_connection(server.getsockname())
        supervisor, _ = server.accept()
    with line:
        supervisor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        supervisor.close()
        async with asyncio.timeout(LONGEST_WAIT_S):
            await Shared(0, line, memoryview(bytearray(4)).cast("i"), line).follow_supervisor(lambda: told.append(0))
    assert told == [signal.SIGTERM]


# As a worker does, without what it serves: that takes seconds to import.
WORKER = """
import asyncio, json, pathlib, os, socket, sys
from tercet.router.workers import Shared
line = socket.socket(fileno=json.load(sys.stdin)["line"])
shared = Shared(0, line, memoryview(bytearray(4)).cast("i"), line)
shared.serving()
pathlib.Path(str(os.getpid())).touch()
asyncio.run(shared.follow_supervisor(lambda: None))
"""
SUPERVISOR = """
import sys
from tercet.router import workers
from tercet.settings import EngineAddress, RouterConfig
workers.COMMAND = sys.argv[1]
engines = (EngineAddress("e", "http://e"),)
sys.exit(workers.supervise(RouterConfig(engines=engines, workers=2, host="127.0.0.1", port=int(sys.argv[2]))))
"""


async def test_workers_that_the_system_does_not_start_are_failures_and_not_the_end_of_others(
    loads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "RETRY_DELAY_S", 0.001)
    lives = iter([(0, True), OSError(28, "No space left on device"), (0, True), *[OSError(11, "try again")] * 10])

    async def one(_: WorkerSlot) -> tuple[int, bool]:
        found = next(lives)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(WorkerSlot, "_one", one)
    with socket.socket() as listening:
        assert await WorkerSlot(CONFIG, 0, listening, loads, tmp_path, asyncio.Event()).keep() == 1
    assert len(list(lives)) == 10 - workers.MOST_FAILURES


async def test_a_worker_that_is_stopped_is_killed_and_its_neighbour_is_not(
    loads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "COMMAND", WORKER)
    monkeypatch.setattr(workers, "MOST_SILENT_S", 8.0)
    monkeypatch.chdir(tmp_path)
    serving = asyncio.Queue[int]()
    with socket.socket() as listening:
        places = [
            WorkerSlot(CONFIG, index, listening, loads, tmp_path, asyncio.Event(), on_serving=serving.put_nowait)
            for index in range(2)
        ]
        os.ftruncate(loads, workers.LOAD_BYTES * 2)
        lives = [asyncio.create_task(place._one()) for place in places]
        try:
            async with asyncio.timeout(LONGEST_WAIT_S):
                await serving.get()
                await serving.get()
                while len(pids := [int(found.name) for found in tmp_path.iterdir() if found.name.isdecimal()]) < 2:
                    await asyncio.sleep(0.01)
                os.kill(pids[0], signal.SIGSTOP)
                ended, others = await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
            assert [await life for life in ended] == [(-signal.SIGKILL, True)]
            assert len(others) == 1
            os.kill(pids[1], 0)
        finally:
            for life in lives:
                life.cancel()
            await asyncio.gather(*lives, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -9)])
def test_workers_end_with_their_supervisor(tmp_path: Path, number: signal.Signals, code: int) -> None:
    port = free_ports("127.0.0.1", 1)[0]
    errors = tmp_path.with_name(f"{tmp_path.name}.log")
    command = [sys.executable, "-c", SUPERVISOR, WORKER, str(port)]
    with errors.open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stderr=log, env={**os.environ, WARM_PARENT_VARIABLE: COLD})
    try:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        wait_until(lambda: f"router_ready: the router serves smollm2 at 127.0.0.1:{port}" in errors.read_text())
        assert errors.read_text().count("router_ready") == 1
        process.send_signal(number)
        assert process.wait(60) == code
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not any((Path("/proc") / worker.name).exists() for worker in tmp_path.iterdir()))


# Where the warm parent forks no worker, the worker is one that imports by itself, and the log says why.


class Refusing(Forks):
    def __init__(self) -> None: ...

    async def fork(self, descriptors: Sequence[int]) -> Any:
        raise NoFork("it has 2 Python threads")


async def test_a_worker_that_is_not_forked_imports_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    cold = SimpleNamespace(stdin=None)

    async def start_cold(*_: object, **__: object) -> Any:
        return cold

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_cold)
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as loads, caplog.at_level(logging.WARNING, "tercet.router.workers"):
        config = RouterConfig(model="m", engines=(EngineAddress("e", "http://127.0.0.1:1"),))
        place = WorkerSlot(config, 1, ours, loads.fileno(), tmp_path, asyncio.Event(), Refusing())
        assert await place._start(theirs) is cold  # pyright: ignore[reportPrivateUsage]
    assert "worker 1 imports vLLM itself: it has 2 Python threads" in caplog.text
