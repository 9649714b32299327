"""What is said of processes while they load."""

from __future__ import annotations

import asyncio
import io

import pytest
from rich.console import Console

from tercet.cli import terminal, up
from tercet.cli.up import FleetProgress


def said_on(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> io.StringIO:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=100, highlight=False, _environ={"TERM": "xterm"})
    monkeypatch.setattr(terminal, "console", console, raising=False)
    monkeypatch.setattr("sys.stdout", out)
    return out


async def start(progress: FleetProgress) -> None:
    async with progress:
        progress("prefill-0", "loading")
        progress("router", "loading")
        progress("prefill-0", "loading: weights")
        await asyncio.sleep(0.1)
        progress("prefill-0", "ready in 31 s (weights 3 s)")
        progress("router", "ready in 32 s")


async def test_elsewhere_each_stage_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "STILL_SECONDS", 0.03)
    out = said_on(monkeypatch, is_terminal=False)
    await start(FleetProgress())
    lines = out.getvalue().splitlines()
    assert lines[:3] == ["  prefill-0: loading", "  router: loading", "  prefill-0: weights (0 s)"]
    assert "  still loading: prefill-0 (weights, 0 s), router (starting, 0 s)" in lines
    assert lines[-2:] == ["  prefill-0: ready in 31 s (weights 3 s)", "  router: ready in 32 s"]


async def test_on_a_terminal_a_table_shows_them_until_they_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    out = said_on(monkeypatch, is_terminal=True)
    await start(FleetProgress())
    shown = out.getvalue()
    row = next(line for line in shown.splitlines() if "weights" in line and "prefill-0" in line)
    assert "0 s" in row
    assert "prefill-0: ready in 31 s (weights 3 s)" in shown
    assert "loading" not in shown


@pytest.mark.parametrize("is_terminal", [True, False])
async def test_a_start_anew_is_said_in_lines(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out = said_on(monkeypatch, is_terminal=is_terminal)
    async with FleetProgress() as progress:
        progress.close()
        progress("decode-0", "loading")
        progress("decode-0", "loading: weights")
        progress("decode-0", "ready in 9 s")
    assert [line[line.index("decode-0") :] for line in out.getvalue().splitlines() if "decode-0" in line] == [
        "decode-0: loading", "decode-0: weights (0 s)", "decode-0: ready in 9 s",
    ]  # fmt: skip
