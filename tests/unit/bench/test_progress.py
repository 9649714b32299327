"""What is seen while a point is measured, and what a file tells about its making."""

from __future__ import annotations

import asyncio
import io
import os
import re

import pytest

from tercet_bench import traffic
from tercet_bench.bench_config import SECRET_HEADERS
from tercet_bench.traffic import LiveProgress
from tercet_lab.bench.results import command_line, machine, versions
from tercet_lab.tables import RequestRow
from tests.longest_wait import LONGEST_WAIT_S


class Terminal(io.StringIO):
    """Text that was written to a terminal."""

    def isatty(self) -> bool:
        return True


def record(index: int, *, fine: bool = True) -> RequestRow:
    told = {"first_token": 0.25, "output_tokens": 11} if fine else {"failure": "http"}
    return RequestRow(id=index, scheduled=0.0, sent=0.0, ended=0.45, **told)  # type: ignore[arg-type]


def test_a_line_has_the_live_numbers() -> None:
    seen = LiveProgress("dp", 10, io.StringIO())
    assert re.fullmatch(r"dp: 0/10, 0 in flight, 0 tokens/s, \d+ s", seen.line())
    for _ in range(4):
        seen(None)
    seen(record(0))
    seen(record(1, fine=False))
    assert re.fullmatch(r"dp: 2/10, 2 in flight, 1 failed, \d+ tokens/s, \d+ s", seen.line())


async def until(out: io.StringIO, text: str) -> None:
    async with asyncio.timeout(LONGEST_WAIT_S):
        while text not in out.getvalue():
            await asyncio.sleep(0.005)


async def test_a_terminal_has_a_line_that_is_rewritten_and_goes_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "TERMINAL_SECONDS", 0.01)
    out = Terminal()
    async with LiveProgress("dp", 2, out) as seen:
        seen(None)
        seen(record(0))
        await until(out, "\r\x1b[Kdp: 1/2")
    assert "\n" not in out.getvalue()
    assert out.getvalue().endswith("\r\x1b[K")


async def test_a_file_has_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "PLAIN_SECONDS", 0.01)
    out = io.StringIO()
    async with LiveProgress("dp", 2, out):
        await until(out, "dp: 0/2")
    assert "\x1b" not in out.getvalue()


async def test_a_reader_that_is_gone_is_no_reason_to_stop() -> None:
    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    async with LiveProgress("dp", 2, Gone()) as seen:
        seen(record(0))
    assert "1/2" in seen.line()


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        (["--header", "Authorization=Bearer x"], ["--header", "Authorization=..."]),
        (["--header=api-key=x=y"], ["--header=api-key=..."]),
        (["--header", "x-tercet-program=p"], ["--header", "x-tercet-program=p"]),
    ],
)
def test_the_command_is_kept_without_its_secrets(typed: list[str], kept: list[str]) -> None:
    assert command_line(["bench", *typed], SECRET_HEADERS) == ("bench", *kept)


def test_software_and_machine_are_told() -> None:
    assert {"tercet", "python", "aiohttp", "numpy", "uvloop"} <= versions().keys()
    told = machine()
    assert told["cores"] == os.cpu_count()
    assert told["cpu"]
