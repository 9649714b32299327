"""A log that grows is moved aside, and its writer and its reader go on."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tercet.cluster import running_fleet
from tercet.cluster.child_process import Process
from tercet.cluster.running_fleet import read_events, rotate
from tests.longest_wait import LONGEST_WAIT_S

EVENT = b"WARNING 01-01 00:00:00 [tercet.events] %b\n"


def test_only_a_large_log_is_rotated(tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    log.write_bytes(b"0123456789")
    assert not rotate(log, 10)
    assert rotate(log, 9)
    assert (log.read_bytes(), (tmp_path / "router.log.1").read_bytes()) == (b"", b"123456789")
    assert not rotate(tmp_path / "none.log", 9)


async def test_a_process_goes_on_writing(tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = f"""
import pathlib, time
print("a" * 1000, flush=True)
while not pathlib.Path({str(go)!r}).exists():
    time.sleep(0.01)
print("b" * 10, flush=True)
"""
    log = tmp_path / "it.log"
    log.write_text("of a run before")
    process = Process("it", [sys.executable, "-c", script], {}, log, grace=1.0)
    await process.start()
    try:
        async with asyncio.timeout(60):
            while log.stat().st_size < 1001:
                await asyncio.sleep(0.01)
            assert rotate(log, 100)
            go.touch()
            await process.ended()
        assert log.read_bytes() == b"b" * 10 + b"\n"
    finally:
        await process.stop()


async def test_a_reader_goes_on_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_fleet, "ASK_SECONDS", 0.01)
    log, said = tmp_path / "router.log", list[str]()
    log.write_bytes(b"x" * 1000)
    reading = asyncio.create_task(read_events(log, said.append))
    try:
        async with asyncio.timeout(LONGEST_WAIT_S):
            for number in range(3):
                await asyncio.sleep(0.05)
                with log.open("ab") as writer:
                    writer.write(EVENT % (b"number %d" % number))
                while len(said) <= number:
                    await asyncio.sleep(0.01)
                assert rotate(log, 10)
    finally:
        reading.cancel()
    assert said == ["number 0", "number 1", "number 2"]
