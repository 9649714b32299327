"""The parts of `make test`. A part that fails does not stop the others; a report at the end names failures.

Three lanes run at the same time: tests of the shared engines; tests that start their own processes, then style; and
unit tests. Unit tests and style have a lower priority: they use the time in which the others wait. A test that fails is
run once more. If it then passes, it is flaky: it is named at the end and in build/tests/flaky.txt, and the run
succeeds. If it fails twice, the run fails.

    python -m scripts.run_tests                  all parts
    python -m scripts.run_tests engines envoy    these parts only
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

import psutil

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "build" / "tests"
SLOWEST = 20
# A part that runs longer is interrupted. The longest part took half of this on a busy machine.
MOST_SECONDS = 4000
# An interrupted pytest has this time to print what had failed; then all its processes are killed.
SUMMARY_SECONDS = 60

# A test that ignores its timeout ends its process after the seconds that follow, and prints all stacks.
STUCK = ("-o", "faulthandler_exit_on_timeout=true", "-o")
UNIT = "@tests/unit.args"
"""The file with the folders of the unit tests and their options: pytest reads it; the Makefile names it too."""
ENGINES = (*STUCK, "faulthandler_timeout=1000")


@dataclass(frozen=True)
class Part:
    """A part: one run of pytest, or of another command, which is not repeated after a failure."""

    name: str
    pytest: Sequence[str] = ()
    command: Sequence[str] = ()
    yields: bool = False
    """True if the part has a lower priority than the parts that mostly wait."""


SHARED_LANE = (Part("engines", (*ENGINES, "-m", "not own_engines", "tests/engines")),)
OWN_LANE = (
    Part("fleets", (*ENGINES, "-m", "own_engines", "tests/engines")),
    Part("charts", (*STUCK, "faulthandler_timeout=600", "tests/kubernetes")),
    Part("envoy", (*STUCK, "faulthandler_timeout=600", "tests/envoy")),
    Part("style", command=("make", "--no-print-directory", "lint", "docs"), yields=True),
)
UNIT_LANE = (Part("unit", ("-q", "--hypothesis-profile", "quick", UNIT), yields=True),)


LANES = (SHARED_LANE, OWN_LANE, UNIT_LANE)


@dataclass
class Outcome:
    """The result of a part. ``seconds`` includes its second run; tests are named by pytest's node ids."""

    part: Part
    seconds: float = 0.0
    failed: list[str] = field(default_factory=list)
    flaky: list[str] = field(default_factory=list)
    durations: list[tuple[float, str]] = field(default_factory=list)


def main(names: Sequence[str]) -> int:
    """Run the parts with these names, or all parts. Return the exit code."""
    known = [part.name for lane in LANES for part in lane]
    if unknown := sorted({*names} - {*known}):
        print(f"run_tests: {', '.join(unknown)}: unknown part; parts are {', '.join(known)}", file=sys.stderr)
        return 2
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    first, *others = ([part for part in lane if not names or part.name in names] for lane in LANES)
    with ThreadPoolExecutor(len(others)) as pool:
        aside = [pool.submit(_run_lane, lane, aside=True) for lane in others]
        outcomes = [*_run_lane(first, aside=False), *(outcome for lane in aside for outcome in lane.result())]
    flaky = [test for outcome in outcomes for test in outcome.flaky]
    (RESULTS / "flaky.txt").write_text("".join(f"{test}\n" for test in flaky))
    print(report(outcomes), flush=True)
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def _run_lane(lane: Sequence[Part], *, aside: bool) -> list[Outcome]:
    return [_run(part, aside=aside) for part in lane]


def _run(part: Part, *, aside: bool) -> Outcome:
    """Run a part and return its result. With ``aside``, its output is printed when it has ended."""
    outcome, began = Outcome(part), time.monotonic()
    if part.command:
        if _said(part, part.command, aside=aside) != 0:
            outcome.failed.append(part.name)
    else:
        first = _pytest(part, (), aside=aside)
        outcome.durations = _durations(part)
        if first == -signal.SIGKILL:
            outcome.failed = [*_last_failed(part), f"{part.name}: it did not end"]
        elif first != 0:
            failed = _last_failed(part)
            if failed:
                print(f"\n{part.name}: {len(failed)} tests failed; they are run once more", flush=True)
                second = _pytest(part, ("--last-failed", "--last-failed-no-failures", "none"), aside=aside)
            else:
                print(f"\n{part.name}: pytest ended with exit code {first}, but no test failed", flush=True)
                second = first
            outcome.failed, outcome.flaky = judge(part.name, failed, second, _last_failed(part))
    outcome.seconds = time.monotonic() - began
    return outcome


def judge(name: str, first: Iterable[str], code: int, second: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the failed and the flaky tests, given those that failed in the ``first`` and in the ``second`` run.

    ``code`` is the exit code of the second run. A second run that was aborted proves nothing: then all tests of
    ``first`` failed.
    """
    first, second = sorted(first), sorted(second)
    if code == 0:
        return [], first
    if code != 1 or not second:
        return first or [name], []
    return second, sorted({*first} - {*second})


def _pytest(part: Part, more: Sequence[str], *, aside: bool) -> int:
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={RESULTS / part.name}",
               f"--junitxml={_report_of(part, again=bool(more))}", *part.pytest, *more]  # fmt: skip
    return _said(part, command, aside=aside)


def _said(part: Part, command: Sequence[str], *, aside: bool) -> int:
    """Run a command of a part. Return its exit code."""
    name = part.name
    if part.yields:
        command = ["nice", "-n", "3", *command]
    print(f"\n== {name}{', output follows when it has ended' if aside else ''}", flush=True)
    if not aside:
        return run_bounded(command, MOST_SECONDS)
    output = RESULTS / f"{name}.log"
    with output.open("wb") as log:
        code = run_bounded(command, MOST_SECONDS, log)
    print(f"\n== {name}\n{output.read_text(errors='replace')}", flush=True)
    return code


def run_bounded(command: Sequence[str], seconds: float, log: IO[bytes] | None = None) -> int:
    """Run a command for at most ``seconds``. Return its exit code, or ``-SIGKILL`` if it did not end in time."""
    with subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            print(f"\nrun_tests: stopped after {seconds:.0f} s: {' '.join(command)}", flush=True)
            below = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(SUMMARY_SECONDS)
            _kill_all(process.pid, below)
            return -signal.SIGKILL


def _kill_all(pid: int, known: Sequence[psutil.Process]) -> None:
    """Kill a process, its descendants, and the ``known`` ones, which may have lost their parent."""
    found = set(known)
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        found |= {top, *top.children(recursive=True)}
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs([process for process in found if process.pid != pid], timeout=30)


def _report_of(part: Part, *, again: bool = False) -> Path:
    return RESULTS / f"{part.name}{'-again' if again else ''}.xml"


def _last_failed(part: Part) -> list[str]:
    try:
        return sorted(json.loads((RESULTS / part.name / "v" / "cache" / "lastfailed").read_text()))
    except FileNotFoundError:
        return []


def _durations(part: Part) -> list[tuple[float, str]]:
    """Return seconds and names of the tests that ended; empty if the run was aborted.

    A test that an interruption ended is left out: it has no class.
    """
    try:
        cases = ElementTree.parse(_report_of(part)).getroot().iter("testcase")
    except (FileNotFoundError, ElementTree.ParseError):
        return []
    ended = (case.attrib for case in cases if "classname" in case.attrib)
    return [(float(case["time"]), f"{case['classname']}::{case['name']}") for case in ended]


def report(outcomes: Sequence[Outcome]) -> str:
    """Return the report at the end of a run, as text."""
    lines = ["", f"== parts ({time.strftime('%Y-%m-%d')})"]
    for outcome in outcomes:
        kind = "FAILED" if outcome.failed else "flaky" if outcome.flaky else "passed"
        lines.append(f"{outcome.seconds:7.0f} s  {outcome.part.name:10} {kind}")
    lines.append(f"== slowest tests, with their fixtures (all in {RESULTS.relative_to(ROOT)}/*.xml)")
    slowest = sorted((each for outcome in outcomes for each in outcome.durations), reverse=True)[:SLOWEST]
    lines += [f"{seconds:7.0f} s  {name}" for seconds, name in slowest]
    for title, tests in (
        ("flaky: failed once, passed when run again", [test for outcome in outcomes for test in outcome.flaky]),
        ("FAILED", [test for outcome in outcomes for test in outcome.failed]),
    ):
        if tests:
            lines += [f"== {title}", *(f"  {test}" for test in tests)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
