"""The table of what was verified is made of what tests recorded, and releases say the same of vLLM and Python."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
from scripts.matrix import NO_VLLM, PAGE, RECORDS, Outcome, Place, Row, merged, recorded, table, with_table

from tercet.vllm_plugin.hooks import MINORS

ROOT = Path(__file__).resolve().parents[3]
HERE, ELSEWHERE = Place("0.32.0", "3.11", "CPU", "host"), Place("0.33.0", "3.11", "CPU", "host")


def outcome(test: str, passed: bool = True, day: str = "2026-02-01", feature: str = "moves") -> Outcome:
    return Outcome(test, feature, HERE, day, passed)


def test_the_page_has_the_table_of_the_records() -> None:
    text = PAGE.read_text()
    assert with_table(text, recorded()) == text, "python -m scripts.matrix writes it"


def test_rows_by_hand_have_their_day_on_the_page_that_they_name() -> None:
    assert [row for row in recorded() if row.source]
    for row in recorded():
        on_device = not row.place.device.startswith("CPU")
        assert bool(row.source) == on_device, f"{row.feature} on {row.place.device}: no test on a GPU records by itself"
        assert not row.source or row.day in (ROOT / row.source).read_text()


def test_a_run_renews_its_rows_and_no_others() -> None:
    before = [Row("moves", HERE, "2026-01-01", 2), Row("moves", ELSEWHERE, "2026-01-01", 9)]
    after, notes = merged(before, [outcome("a"), outcome("b")])
    assert (after, notes) == ([Row("moves", HERE, "2026-02-01", 2), before[1]], [])


def test_a_run_of_fewer_tests_renews_nothing_unless_it_is_said() -> None:
    before = [Row("moves", HERE, "2026-01-01", 2)]
    after, (note,) = merged(before, [outcome("a")])
    assert after == before
    assert note == "moves (0.32.0 3.11 CPU host): kept: 1 tests ran, and 2 on 2026-01-01; --fewer renews it"
    assert merged(before, [outcome("a")], fewer=True)[0] == [Row("moves", HERE, "2026-02-01", 1)]


def test_a_failed_test_removes_its_row_until_it_has_passed_again() -> None:
    before = [Row("moves", HERE, "2026-01-01", 2)]
    after, (note,) = merged(before, [outcome("a"), outcome("b", passed=False)])
    assert (after, note) == ([], "moves (0.32.0 3.11 CPU host): not verified: b")
    again = [outcome("a"), outcome("b", passed=False), outcome("b")]
    assert merged(before, again)[0] == [Row("moves", HERE, "2026-02-01", 2)]


def test_a_place_is_a_line_with_its_features_by_day() -> None:
    rows = [Row("moves", HERE, "2026-02-01", 1), Row("a store", HERE, "2026-02-01", 1), Row("x", HERE, "2026-01-01", 1)]
    assert table(rows).splitlines()[2:] == [
        "| 0.32.0 | 3.11 | CPU | host | x (2026-01-01); a store, moves (2026-02-01) |"
    ]


MARKED = """
import pytest

pytestmark = pytest.mark.verifies("one", vllm=False)

@pytest.mark.parametrize("way", ["tcp"])
@pytest.mark.verifies("two", transport="{way}", vllm=False)
def test_passes(way): ...

def test_fails(): assert False

@pytest.mark.skip
def test_is_left_out(): ...

@pytest.fixture
def broken():
    yield
    raise RuntimeError

def test_leaves_something(broken): ...
"""


@pytest.mark.processes
@pytest.mark.parametrize("forks", ["0", "2"])
def test_marked_tests_record_their_outcomes_when_they_are_asked_to(tmp_path: Path, forks: str) -> None:
    (tmp_path / "test_marked.py").write_text(MARKED)
    code = (
        "import sys, pathlib, pytest, scripts.matrix as matrix\n"
        "matrix.PENDING = pathlib.Path(sys.argv[1])\n"
        "pytest.main(['-q', '-p', 'no:cacheprovider', '-p', 'tests.conftest', '--forks', sys.argv[2], "
        "'--confcutdir', sys.argv[3], sys.argv[3]])"
    )

    def run(asked: str) -> dict[str, set[tuple[str, str, bool]]]:
        pending = tmp_path / f"pending{asked}"
        done = subprocess.run(
            [sys.executable, "-c", code, str(pending), forks, str(tmp_path)],
            cwd=ROOT, env={"RECORD_VERIFIED": asked}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert "2 failed" in done.stdout or "1 failed" in done.stdout, done.stdout + done.stderr
        found: dict[str, set[tuple[str, str, bool]]] = {}
        for line in [line for file in pending.glob("*") for line in file.read_bytes().splitlines()]:
            each = msgspec.json.decode(line, type=Outcome)
            assert each.place.vllm == NO_VLLM
            found.setdefault(each.test.rpartition("::")[2], set()).add(
                (each.feature, each.place.transport, each.passed)
            )
        return found

    assert run("") == {}
    assert run("1") == {
        "test_passes[tcp]": {("one", "", True), ("two", "tcp", True)},
        "test_fails": {("one", "", False)},
        "test_leaves_something": {("one", "", False)},
    }


def test_each_release_says_with_which_vllm_and_python_it_runs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pinned,) = (each for each in project["optional-dependencies"]["cuda"] if each.startswith("vllm=="))
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## (Not released|\d.+)\n\n(.*)$", text, re.MULTILINE)
    assert releases
    for version, first in releases:
        assert re.fullmatch(r"Runs with vLLM [0-9., and]+; Python 3\.\d+.*\.", first), f"{version}: {first}"
    newest = releases[0][1]
    assert re.findall(r"\b0\.\d+", newest) == [*MINORS]
    assert pinned.removeprefix("vllm==").rpartition(".")[0] in MINORS
    assert re.findall(r"\b3\.\d+", newest) == [project["requires-python"].removeprefix(">=")]
    tried = [row.place for row in recorded() if row.place.vllm != NO_VLLM]
    assert {place.vllm.rpartition(".")[0] for place in tried} == {*MINORS}
    assert {place.python for place in tried if place.python} == {*re.findall(r"\b3\.\d+", newest)}


def test_the_records_are_a_file_that_a_person_can_read() -> None:
    written = msgspec.json.format(msgspec.json.encode(recorded()), indent=1) + b"\n"
    assert written == RECORDS.read_bytes()
