"""`tercet up` and `tercet demo` as processes of their own, stopped and killed at many moments."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tercet.cluster.model import resolve_model
from tests.longest_wait import LONGEST_WAIT_S

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[3]


class Run:
    """One `tercet` over fake servers, and what is left of it."""

    def __init__(self, directory: Path, mode: str, *arguments: str, terminal: int | None = None) -> None:
        self.mark = f"mark-{uuid.uuid4().hex}"
        self.out = directory / "out"
        # With the built-in model that the machine has: to convert it takes 20 seconds of CPU time.
        cache, models = directory / "cache", Path(resolve_model("smollm2")).parent
        cache.mkdir(exist_ok=True)
        if not (cache / models.name).exists():
            (cache / models.name).symlink_to(models)
        environment = {**os.environ, "TERCET_CACHE": str(cache), "TERM": "xterm"}
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.unit.cli.fake_fleet", self.mark, mode, *arguments],
                stdout=terminal or out, stderr=terminal or subprocess.STDOUT, env=environment, cwd=ROOT,
            )  # fmt: skip

    def left(self) -> list[psutil.Process]:
        found = [
            process for process in psutil.process_iter(["cmdline"]) if self.mark in (process.info["cmdline"] or ())
        ]
        return [process for process in found if process.pid != self.process.pid]

    def leaves_nothing(self, seconds: float = LONGEST_WAIT_S) -> bool:
        deadline = time.monotonic() + seconds
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.left()

    def says(self, text: str, seconds: float = 200.0) -> str:
        deadline = time.monotonic() + seconds
        while text not in self.out.read_text():
            assert self.process.poll() is None or text in self.out.read_text(), self.out.read_text()
            assert time.monotonic() < deadline, self.out.read_text()
            time.sleep(0.02)
        return self.out.read_text()

    def signal(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=200)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[list[Run]]:
    """Runs to be cleaned up after a test that failed."""
    runs: list[Run] = []
    yield runs
    for run in runs:
        run.process.kill()
        run.process.wait()
        for process in run.left():
            process.kill()


def start_up(tmp_path: Path, runs: list[Run], mode: str, *arguments: str) -> Run:
    run = Run(tmp_path, mode, "up", "--model", str(tmp_path), "--port", "0", *arguments)
    runs.append(run)
    return run


def test_up_says_where_everything_is(tmp_path: Path, up: list[Run]) -> None:
    run = start_up(tmp_path, up, "answers", "--both", "1", "--served-model-name", "m")
    text = run.says("Ctrl-C finishes running requests")
    for expected in (
        "prefill-0: loading", "router: ready in", "model m, program disaggregated", "decode-0   decode   http://127.0.0.1:",
        "engine-0   both ", f"logs: {tmp_path}/cache/logs/", "/v1/chat/completions -H 'content-type: application/json'",
    ):  # fmt: skip
        assert expected in text
    assert len(run.left()) == 4 * 4  # a guard, who watches it, a server and the server's child, four times
    assert run.signal(signal.SIGINT) == 130
    assert run.leaves_nothing(0)
    assert run.out.read_text().endswith("stopping\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("after", [0.1, 0.3, 0.5, 0.7, 1.0, 1.5])
def test_ended_at_any_moment_of_the_start_it_leaves_nothing(
    tmp_path: Path, up: list[Run], number: signal.Signals, after: float
) -> None:
    run = start_up(tmp_path, up, "never-ready")
    time.sleep(after)
    code = run.signal(number)
    # Python itself, interrupted before it runs anything of ours, ends with 1 and says so.
    assert code in (128 + number, -number) or (code == 1 and "Fatal Python error: init" in run.out.read_text())
    assert run.leaves_nothing(5 if number == signal.SIGKILL else 0)
    assert "src/tercet" not in run.out.read_text()  # no traceback, but one of Python's own start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ended_when_it_is_ready_it_leaves_nothing(tmp_path: Path, up: list[Run], number: signal.Signals) -> None:
    run = start_up(tmp_path, up, "answers")
    run.says("Ctrl-C")
    run.signal(number)
    assert run.leaves_nothing(5 if number == signal.SIGKILL else 0)


def test_a_second_ctrl_c_hurries_and_does_not_break_off_the_stop(tmp_path: Path, up: list[Run]) -> None:
    run = start_up(tmp_path, up, "stubborn")
    run.says("Ctrl-C")
    run.process.send_signal(signal.SIGINT)
    run.says("stopping")
    run.process.send_signal(signal.SIGINT)
    run.says("stopping at once")
    assert run.process.wait(timeout=200) == 130
    assert run.leaves_nothing(0)


def test_when_all_servers_are_killed_and_none_is_restarted_it_ends_by_itself(tmp_path: Path, up: list[Run]) -> None:
    run = start_up(tmp_path, up, "answers", "--engine-restarts", "0")
    run.says("Ctrl-C")
    for process in run.left():
        process.kill()
    assert run.process.wait(timeout=200) == 1
    assert "was killed by SIGKILL" in run.out.read_text()
    assert "Traceback" not in run.out.read_text()


def test_on_a_terminal_there_is_a_live_line(tmp_path: Path, up: list[Run]) -> None:
    ours, theirs = pty.openpty()
    run = Run(tmp_path, "answers", "up", "--model", str(tmp_path), "--port", "0", terminal=theirs)
    up.append(run)
    os.close(theirs)
    seen = b""
    while b"Ctrl-C" not in seen:
        seen += os.read(ours, 4096)
    assert b"decode-0: ready in" in seen
    assert run.signal(signal.SIGINT) == 130
    assert run.leaves_nothing(0)
    os.close(ours)


def test_the_demo_shows_the_answer_and_what_happened(tmp_path: Path, up: list[Run]) -> None:
    run = Run(tmp_path, "answers", "demo")
    up.append(run)
    assert run.process.wait(timeout=200) == 0, run.out.read_text()
    text = run.out.read_text()
    assert text.count("Maren [keeps] it.") == 2
    assert (
        "prefill-0 prefilled 442 tokens (0 were cached) and pushed tokens [0, 442) to decode-0: 10.0 MB in 30 chunks "
        "over host"
    ) in text
    assert "TTFT 200 ms, TPOT 30 ms" in text
    assert run.leaves_nothing(0)


def test_a_demo_that_breaks_off_says_so(tmp_path: Path, up: list[Run]) -> None:
    run = Run(tmp_path, "breaks-off", "demo")
    up.append(run)
    assert run.process.wait(timeout=200) == 1
    last = run.out.read_text().splitlines()[-1]
    assert last.startswith("tercet: the router's answer was interrupted")
    assert run.leaves_nothing(0)


# ---- in the background ---------------------------------------------------------------------------------------


def tercet(tmp_path: Path, mode: str, runs: list[Run], *arguments: str) -> tuple[int, str]:
    """A command to its end: exit code and what it said."""
    run = Run(tmp_path, mode, *arguments)
    runs.append(run)
    return run.process.wait(timeout=90), run.out.read_text()


def processes_of(directory: Path) -> list[psutil.Process]:
    """The background processes of fleets whose logs are there."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(directory) in part for part in process.info["cmdline"] or ()) and "-c" in process.info["cmdline"]
    ]


def test_a_fleet_in_the_background_is_told_from_others_by_its_port_and_stopped(tmp_path: Path, up: list[Run]) -> None:
    for _ in range(2):
        code, said = tercet(tmp_path, "answers", up, "up", "--model", str(tmp_path), "--port", "0", "--detach")
        assert code == 0, said
        assert "in the background" in said
        assert "router: ready in" in said
    ports = sorted(int(file.stem.partition("-")[0]) for file in (tmp_path / "cache" / "fleets").iterdir())
    assert len(ports) == 2
    code, said = tercet(tmp_path, "answers", up, "down")
    assert (code, said) == (
        2, f"tercet: --port: fleets run at the ports {ports[0]}, {ports[1]}; give one of them, or --all\n",
    )  # fmt: skip
    assert tercet(tmp_path, "answers", up, "down", "--port", str(ports[0]))[0] == 0
    assert [int(file.stem.partition("-")[0]) for file in (tmp_path / "cache" / "fleets").iterdir()] == ports[1:]
    assert tercet(tmp_path, "answers", up, "down")[0] == 0
    assert list((tmp_path / "cache" / "fleets").iterdir()) == []
    assert all(run.leaves_nothing(0) for run in up)
    code, said = tercet(tmp_path, "answers", up, "down")
    assert (code, said) == (1, "tercet: no fleet of `tercet up --detach` runs here\n")


def test_a_fleet_that_is_refused_in_the_background_ends_with_2_and_names_the_flag(
    tmp_path: Path, up: list[Run]
) -> None:
    too_much = ("--model", str(tmp_path), "--port", "0", "--kv-cache-gib", "1000000")
    code, said = tercet(tmp_path, "answers", up, "up", *too_much, "--detach")
    assert code == 2
    assert said.startswith("tercet: --kv-cache-gib: 2 engines")


def test_a_fleet_in_the_background_that_was_killed_leaves_nothing(tmp_path: Path, up: list[Run]) -> None:
    assert tercet(tmp_path, "answers", up, "up", "--model", str(tmp_path), "--port", "0", "--detach")[0] == 0
    (process,) = processes_of(tmp_path / "cache")
    process.kill()
    assert up[0].leaves_nothing(10)
    code, _ = tercet(tmp_path, "answers", up, "down")
    assert code == 1
    assert list((tmp_path / "cache" / "fleets").iterdir()) == []


def test_ctrl_c_before_a_fleet_is_in_the_background_stops_it(tmp_path: Path, up: list[Run]) -> None:
    run = start_up(tmp_path, up, "never-ready", "--detach")
    run.says("router: loading")
    run.signal(signal.SIGINT)
    assert run.leaves_nothing(0)
    assert processes_of(tmp_path / "cache") == []
