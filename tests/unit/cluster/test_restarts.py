"""When an engine that has ended is started anew."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.cluster import running_fleet
from tercet.cluster.child_process import Process
from tercet.cluster.running_fleet import (
    FIRST_PAUSE,
    LIVED_SECONDS,
    LONGEST_PAUSE,
    Restarts,
    StartProgress,
    read_events,
    rotate,
)
from tercet.vllm_plugin.start.process_output import MARK
from tests.clock import Clock
from tests.longest_wait import LONGEST_WAIT_S, until


def test_each_start_waits_twice_as_long_up_to_a_bound() -> None:
    restarts = Restarts(8)
    assert [restarts.ended(now) for now in range(9)] == [1, 2, 4, 8, 16, 30, 30, 30, None]


def test_never_is_never() -> None:
    restarts = Restarts(0)
    restarts.ready(0.0)
    assert restarts.ended(10 * LIVED_SECONDS) is None


def test_an_engine_that_has_lived_gets_all_of_them_back() -> None:
    restarts = Restarts(1)
    assert restarts.ended(0.0) == FIRST_PAUSE
    restarts.ready(5.0)
    assert restarts.ended(5.0 + LIVED_SECONDS) == FIRST_PAUSE
    restarts.ready(100.0)
    assert restarts.ended(99.0 + LIVED_SECONDS) is None


def test_time_in_which_it_was_loading_is_not_life() -> None:
    restarts = Restarts(1)
    restarts.ready(0.0)
    assert restarts.ended(1.0) == FIRST_PAUSE
    assert restarts.ended(1.0 + 2 * LIVED_SECONDS) is None, "it never became ready again"


@given(limit=st.integers(0, 60), lives=st.lists(st.none() | st.floats(0, 2 * LIVED_SECONDS), max_size=40))
def test_no_engine_gets_more_in_a_row_than_the_limit(limit: int, lives: list[float | None]) -> None:
    restarts, now, in_a_row = Restarts(limit), 0.0, 0
    for life in lives:
        if life is not None:
            restarts.ready(now)
            now += life
            in_a_row = 0 if life >= LIVED_SECONDS else in_a_row
        pause = restarts.ended(now)
        if pause is None:
            assert in_a_row == limit
        else:
            in_a_row += 1
            assert in_a_row <= limit
            assert FIRST_PAUSE <= pause <= LONGEST_PAUSE
            now += pause


# How far a start has come, from the stages in its log.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(running_fleet, "time", clock)
    return clock


def test_stages_are_read_as_they_come_and_the_long_ones_are_summed_up(tmp_path: Path, clock: Clock) -> None:
    log = tmp_path / "log"
    progress = StartProgress(log)
    assert not progress.look()  # there is no log yet
    log.write_text("importing stage: nothing\n")
    assert not progress.look()
    clock.now += 12
    with log.open("a") as out:
        out.write(f"INFO 11-23 {MARK}weights\nINFO 11-23 {MARK}KV ca")
    assert progress.look()
    assert progress.stage == "weights"
    clock.now += 3
    assert not progress.look()  # the line is not whole
    with log.open("a") as out:
        out.write("che\n")
    assert progress.look()
    assert progress.stage == "KV cache"
    clock.now += 0.4
    assert progress.summary() == "15 s (starting 12 s, weights 3 s)"


def test_a_server_without_stages_has_only_its_time(tmp_path: Path, clock: Clock) -> None:
    progress = StartProgress(tmp_path / "log")
    clock.now += 4
    assert progress.summary() == "4 s"


# A log that grows is moved aside, and its writer and its reader go on.


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
            await until(lambda: log.stat().st_size >= 1001)
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
