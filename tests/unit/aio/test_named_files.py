"""Files that users name: no kind of file makes a reader wait without a bound."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tercet.aio import files
from tercet.aio.files import FileThread, read_named, read_whole, write_whole
from tercet.programs import load_program
from tercet.protocol import BadRequest
from tercet.settings import read_yaml
from tercet.settings.process_settings import KeyFile
from tercet.wire.client import engine_tls
from tercet_checks.chaos.chaos_report import load_schedule
from tercet_gateway.proxied_calls import ServedCertificate
from tercet_lab.bench.results import load_result
from tercet_lab.bench.workloads.recorded import read_text
from tercet_lab.sim.step_times import load_profile
from tests.longest_wait import until

READERS: dict[str, Callable[[Path], object]] = {
    "config": read_yaml,
    "keys": lambda path: KeyFile(str(path), "api-key-file").first(),
    "schedule": load_schedule,
    "result": load_result,
    "workload": lambda path: read_text(str(path), "mooncake"),
    "profile": lambda path: load_profile(str(path)),
    "program": lambda path: load_program(f"{path}:serve"),
    "certificate": lambda path: ServedCertificate(path, path),
    "authority": lambda path: engine_tls(str(path), None, None),
    "pair": lambda path: engine_tls(None, str(path), None),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "socket", "nothing"])
def test_every_kind_ends_with_one_line(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIPE_SECONDS", 0.01)
    path = tmp_path / "given.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
    with pytest.raises(BadRequest) as refused:
        READERS[name](path)
    assert "\n" not in refused.value.message
    assert "None" not in refused.value.message


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    said = b"port: 8001\n" * 20_000
    writing = threading.Thread(target=path.write_bytes, args=(said,))
    writing.start()
    assert read_named(path) == said
    writing.join()
    (tmp_path / "long").write_bytes(b"long")
    with pytest.raises(OSError, match="has more than 3 bytes"):
        read_named(tmp_path / "long", 3)


# Files that are read whole: what is no regular file is an error, and nothing stays open.


@pytest.mark.parametrize("kind", ["directory", "pipe", "device", "too long"])
def test_what_is_refused_leaves_nothing_open(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"123456")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=r"regular|bytes"):
        read_whole(path, most=5)
    assert os.listdir("/proc/self/fd") == before


def test_a_named_folder_is_refused_and_leaves_nothing_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="is neither a file nor a pipe"):
        read_named(tmp_path)
    assert os.listdir("/proc/self/fd") == before


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", b"content", lasting=True)
    assert read_whole(tmp_path / "file") == b"content"
    assert os.listdir(tmp_path) == ["file"]


# File I/O next to a loop: results, errors, and what does not return.


async def test_results_and_errors_are_the_callers() -> None:
    files = FileThread()
    assert await files.run(lambda a, b: a + b, 1, 2) == 3
    with pytest.raises(ZeroDivisionError):
        await files.run(lambda: 1 // 0)
    assert await asyncio.gather(*(files.run(lambda n=n: n) for n in range(50))) == list(range(50))
    files.close()


async def test_a_call_that_does_not_return_holds_up_nobody() -> None:
    files, go = FileThread(0.1, 0.05), threading.Event()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await files.run(go.wait)
    assert files.is_stuck
    for _ in range(1000):
        with pytest.raises(TimeoutError):
            await files.run(lambda: None)
    assert time.monotonic() - began < 20
    assert sum(thread.name == "tercet-files" and thread.daemon for thread in threading.enumerate()) >= 1
    go.set()
    await until(lambda: not files.is_stuck)
    assert await files.run(lambda: "again") == "again"
    files.close()


async def test_a_caller_that_leaves_disturbs_no_other() -> None:
    files, go = FileThread(), threading.Event()
    leaving = asyncio.create_task(files.run(go.wait))
    staying = asyncio.create_task(files.run(lambda: "stays"))
    await asyncio.sleep(0)
    leaving.cancel()
    go.set()
    assert await staying == "stays"
    files.close()
