"""What the Makefile's commands decide: which tests are flaky, which ones a change selects, what is locked."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest
from scripts import quick, run_tests, types_of_src
from scripts.run_tests import Outcome, Part, judge, report

from tests.conftest import NotInCheck

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("first", "code", "second", "failed", "flaky"),
    [
        (["a", "b"], 0, [], [], ["a", "b"]),
        (["a", "b"], 1, ["b"], ["b"], ["a"]),
        (["a", "b"], 1, ["a", "b"], ["a", "b"], []),
        (["a"], 2, [], ["a"], []),  # the second run broke off
        (["a"], -9, ["a"], ["a"], []),
        (["a"], 1, [], ["a"], []),
        ([], 2, [], ["part"], []),  # it could not be collected
    ],
)
def test_a_test_is_flaky_if_it_passes_the_second_time(
    first: list[str], code: int, second: list[str], failed: list[str], flaky: list[str]
) -> None:
    assert judge("part", first, code, second) == (failed, flaky)


def test_the_end_of_a_run_names_what_failed_and_what_wavered() -> None:
    outcomes = [
        Outcome(Part("engines"), 3, failed=["t::bad"], flaky=["t::wavers"], durations=[(2.0, "t::long")]),
        Outcome(Part("charts"), 1),
    ]
    said = report(outcomes)
    assert [said.index(each) for each in ("engines", "t::long", "t::wavers", "t::bad")]
    assert re.search(r"charts\s+passed", said)


@pytest.mark.slow
def test_a_part_whose_tests_fail_is_run_again_and_the_others_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = tmp_path / "test_it.py"
    tests.write_text(
        "import pathlib\n"
        "def test_wavers():\n    seen = pathlib.Path(__file__).with_name('seen')\n    ran = seen.exists()\n"
        "    seen.touch()\n    assert ran\n"
        "def test_good(): pass\n"
    )
    monkeypatch.setattr(run_tests, "RESULTS", run_tests.ROOT / "build" / f"tests-{tmp_path.name}")
    bad = Part("bad", command=("false",))
    computing = (bad, Part("computing", (str(tests), "-p", "no:cacheprovider")))
    monkeypatch.setattr(run_tests, "LANES", (computing, (Part("waiting", (str(tests),)),), ()))
    try:
        assert run_tests.main(["waiting"]) == 0
        assert "test_good" in (run_tests.RESULTS / "waiting.xml").read_text(), "both runs have a report"
        assert "test_wavers" in (run_tests.RESULTS / "flaky.txt").read_text()
        assert run_tests.main(["bad", "waiting"]) == 1
        assert re.search(r"bad +FAILED(.|\n)*waiting +passed", capsys.readouterr().out)
        assert run_tests.main(["unheard"]) == 2
    finally:
        run_tests.shutil.rmtree(run_tests.RESULTS, ignore_errors=True)


def test_the_report_of_an_interrupted_part_has_the_tests_that_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tests, "RESULTS", tmp_path)
    ended, cut = '<testcase classname="a.b" name="c" time="1.5"/>', '<testcase name="d" time="0.1"/>'
    (tmp_path / "unit.xml").write_text(f"<testsuites><testsuite>{ended}{cut}</testsuite></testsuites>")
    assert run_tests._durations(Part("unit")) == [(1.5, "a.b::c")]


@pytest.mark.slow
def test_a_part_that_does_not_end_is_killed_with_what_it_started(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    shell = f"sleep 600 & echo $! >{started}; wait"
    assert run_tests.run_bounded(("bash", "-c", shell), 1) == -signal.SIGKILL
    assert not psutil.pid_exists(int(started.read_text()))


def test_a_part_that_does_not_end_fails_with_the_tests_that_had_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[str]()

    def interrupted(part: Part, *_: object, **__: object) -> int:
        ran.append(part.name)
        return -signal.SIGKILL

    monkeypatch.setattr(run_tests, "_pytest", interrupted)
    monkeypatch.setattr(run_tests, "_last_failed", lambda _: ["test_x.py::test_bad"])
    outcome = run_tests._run(Part("long"), aside=True)  # pyright: ignore[reportPrivateUsage]
    assert outcome.failed == ["test_x.py::test_bad", "long: it did not end"]
    assert not outcome.flaky
    assert ran == ["long"], "it is not run again: most of its tests did not run"


def test_a_change_selects_the_tests_of_its_room() -> None:
    always = list(quick.ALWAYS)
    assert quick.selected_tests([]) == sorted(always)
    assert "tests/unit/fleet" in quick.selected_tests(["src/tercet/fleet/admission.py"])
    assert "tests/unit/lab/sim" in quick.selected_tests(["packages/tercet-lab/src/tercet_lab/sim/clock.py"])
    assert quick.selected_tests(["packages/tercet-lab/pyproject.toml"]) == sorted(always)
    assert quick.selected_tests(["docs/x.md", "tests/unit/fleet/test_gone.py"]) == sorted(always)
    assert "tests/unit/cli" in quick.selected_tests(["src/tercet/cli/app.py", "tests/unit/cli/test_command_line.py"])


def test_types_are_checked_again_when_a_file_differs_or_they_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("src/tercet/a.py", "typings/b.pyi", *types_of_src.SETTINGS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    codes, ran = iter([1, 0, 0, 0, 0]), list[int]()

    def pyright(*_: object, **__: object) -> subprocess.CompletedProcess[bytes]:
        ran.append(next(codes))
        return subprocess.CompletedProcess((), ran[-1])

    monkeypatch.setattr(types_of_src, "ROOT", tmp_path)
    monkeypatch.setattr(types_of_src, "PASSED", tmp_path / "build" / "types.txt")
    monkeypatch.setattr(types_of_src.subprocess, "run", pyright)
    assert [types_of_src.main() for _ in range(3)] == [1, 0, 0]
    assert ran == [1, 0], "what failed is checked again, what passed is not"
    for changed, text in (("src/tercet/a.py", "x = 1"), ("src/tercet/new.py", ""), ("pyproject.toml", "[tool]")):
        (tmp_path / changed).write_text(text)
        assert [types_of_src.main() for _ in range(2)] == [0, 0]
    assert len(ran) == 5


def test_make_check_imports_no_vllm_and_still_knows_that_it_is_there() -> None:
    refuses = NotInCheck()
    assert refuses.find_spec("json", None) is None
    found = refuses.find_spec("vllm", None)
    assert found is not None
    with pytest.raises(RuntimeError, match="mark the test `vllm`"):
        found.loader.exec_module(importlib.util.module_from_spec(found))  # type: ignore[union-attr]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return {found[1]: found[2] for line in lines if (found := re.match(r"([\w.-]+)==([^\s;]+)", line))}


def normal(pinned: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pinned}


def test_what_is_locked_is_what_is_pinned() -> None:
    lists = ("cpu", "docs", "envoy", "kubernetes", "ray", "transport")
    wanted = normal(pin for each in lists for pin in pins(each).items())
    torch = wanted.pop("torch")
    assert normal(pins("locked").items()) == wanted, "make lock"
    assert pins("torch") == {"torch": f"{torch}+cpu"}
    assert f"torch={torch}\n" in (ROOT / "scripts" / "setup").read_text()
