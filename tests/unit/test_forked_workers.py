"""The workers of ``pytest --forks``: each test runs once, and all that it says reaches the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.conftest import pytest_addoption, pytest_configure
"""


def run(folder: Path, files: dict[str, str], *arguments: str) -> tuple[int, str]:
    """The exit code of pytest for these files, and what it printed."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (folder / name).write_text(text)
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--forks", "2", *arguments, ".")
    said = folder / "said.txt"
    with said.open("w") as output:
        ran = subprocess.run(command, cwd=folder, stdout=output, stderr=output, timeout=120, check=False)
    return ran.returncode, said.read_text()


def test_each_test_runs_once_and_files_are_torn_down(tmp_path: Path) -> None:
    counted = """
import os, pytest
@pytest.fixture(scope="module", autouse=True)
def module(): yield; open("down", "a").write(f"{os.getpid()}\\n")
@pytest.mark.parametrize("number", range(50))
def test_it(number, tmp_path): open("ran", "a").write(f"{__name__} {number}\\n"); (tmp_path / "mine").mkdir()
"""
    code, said = run(tmp_path, {"test_a.py": counted, "test_b.py": counted})
    assert code == 0, said
    assert "100 passed" in said
    expected = [f"{name} {number}" for name in ("test_a", "test_b") for number in range(50)]
    assert sorted((tmp_path / "ran").read_text().splitlines()) == sorted(expected)
    assert (tmp_path / "down").exists()


def test_a_worker_takes_fewer_tests_at_a_time_if_they_take_seconds(tmp_path: Path) -> None:
    code, said = run(tmp_path, {"test_a.py": """
import os, pytest
@pytest.mark.parametrize("number", range(7))
@pytest.mark.slow
def test_slow(number): open("slow", "a").write(f"{os.getpid()} {number}\\n")
"""}, "-o", "markers=slow")  # fmt: skip
    assert code == 0, said
    lines = [line.split() for line in (tmp_path / "slow").read_text().splitlines()]
    pids = {number: pid for pid, number in lines}
    assert len({pids[str(number)] for number in range(4)}) == 1
    assert len({pids[str(number)] for number in range(4, 7)}) == 1


def test_what_fails_and_what_is_printed_and_warned_of_is_reported(tmp_path: Path) -> None:
    code, said = run(tmp_path, {"test_a.py": """
import pytest, warnings
def test_good(): warnings.warn("take care", RuntimeWarning)
def test_bad(): print("a word"); assert 1 == 2
@pytest.mark.skip(reason="no time")
def test_not(): pass
@pytest.fixture
def broken(): raise KeyError("gone")
def test_error(broken): pass
"""}, "-rs")  # fmt: skip
    assert code == 1
    for each in ("1 failed, 1 passed, 1 skipped, 1 warning, 1 error", "RuntimeWarning: take care", "a word",
                 "assert 1 == 2", "no time", "KeyError: 'gone'"):  # fmt: skip
        assert each in said


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)", "pytest.exit('enough')"])
def test_a_process_that_ends_fails_its_test_and_those_that_it_had_taken(tmp_path: Path, end: str) -> None:
    code, said = run(tmp_path, {"test_a.py": f"""
import os, pytest
@pytest.mark.parametrize("number", range(60))
def test_it(number):
    if number == 3: {end}
"""})  # fmt: skip
    assert code == 1
    assert "test_it[3] - the worker process ended in this test" in said
    assert "test_it[4] - the test did not run" in said
    assert "test_it[2]" not in said


def test_a_process_that_a_test_leaves_behind_is_not_waited_for(tmp_path: Path) -> None:
    code, said = run(tmp_path, {"test_a.py": """
import os, time
def test_it():
    if pid := os.fork(): open("left", "w").write(str(pid))
    else:
        time.sleep(240)
        os._exit(0)
"""})  # fmt: skip
    os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)  # it is still there
    assert code == 0, said


def test_the_first_failure_is_enough(tmp_path: Path) -> None:
    code, said = run(tmp_path, {"test_a.py": """
import time
def test_bad(): assert False
def test_long(): time.sleep(100)
"""}, "--maxfail", "1")  # fmt: skip
    assert code == 1
    assert "1 failed" in said
    assert "stopping after 1 failures" in said


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    code, said = run(tmp_path, {"test_a.py": "import nothing_of_this_name", "test_b.py": "def test_it(): pass"})
    assert code == 2
    assert "nothing_of_this_name" in said


def test_threads_of_imports_are_refused(tmp_path: Path) -> None:
    code, said = run(tmp_path, {"test_a.py": """
import threading, time
threading.Thread(target=time.sleep, args=(2,), name="early").start()
def test_it(): pass
"""})  # fmt: skip
    assert code == 4
    assert "['early']" in said
