"""Development mode: a file that changes is used anew, one that is broken is not, whatever the clock's resolution."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from tercet.programs import load_program
from tercet.router.observe.metrics import Metrics
from tercet.router.serve.plans import Plan, Rule, Share
from tercet.router.state import loaded_code
from tercet.router.state.loaded_code import FileWatch, files_of, reload_on_change
from tests.longest_wait import until

from .conftest import LiveRouter
from .test_shared_state import joined

SCHEDULING = """
plugins: [{{type: queue-scorer}}, {{type: "mine.py:Mine"}}]
schedulingProfiles: [{{name: {}, plugins: [{{pluginRef: queue-scorer}}, {{pluginRef: "mine.py:Mine"}}]}}]
"""
PLUGIN = """
from tercet.decisions.scheduling import Scorer

class Mine(Scorer, frozen=True):
    def score(self, decision, engines):
        return [{}] * len(engines)
"""
TEXT = "from tercet.protocol import Output\nasync def main(request, fleet):\n    yield Output(({},), 'stop')\n"


@pytest.fixture
async def file(router: LiveRouter, tmp_path: Path) -> AsyncIterator[Path]:
    """A program in use, watched."""
    file = tmp_path / "mine.py"
    file.write_text(TEXT.format(1))
    await router.use(Plan(program=f"{file}:main"))
    watching = asyncio.ensure_future(reload_on_change(router.shared, every=0.01))
    await asyncio.sleep(0)  # it has looked once
    yield file
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching


async def test_a_changed_file_is_used(router: LiveRouter, file: Path) -> None:
    routing = router.service.routing
    assert (await router.ask())[1] == [1]
    for number in (2, 33, 4):
        before = routing.current.number
        file.write_text(TEXT.format(number))
        await until(lambda before=before: routing.current.number > before)
        assert (await router.ask())[1] == [number]


@pytest.mark.slow
async def test_a_change_that_another_worker_has_taken_up_is_not_taken_up_again(
    router: LiveRouter, file: Path, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[list[Path]] = []

    class Watch(FileWatch):
        def changed(self, files: Iterable[Path]) -> list[Path]:
            looks.append(super().changed(files))
            return looks[-1]

    monkeypatch.setattr(loaded_code, "FileWatch", Watch)
    async with joined(router, metrics) as other:
        watching = asyncio.ensure_future(reload_on_change(other.shared, every=0.5))
        await until(lambda: len(looks) == 2)  # the first look at programs and at plugins
        before = router.service.routing.current.number
        file.write_text(TEXT.format(22))
        await until(lambda: other.service.routing.current.number == before + 1)
        await until(lambda: [file] in looks)
        seen = len(looks)
        await until(lambda: len(looks) > seen)  # what it found has been dealt with
        watching.cancel()
        await asyncio.wait({watching})
        assert router.shared.state.program.number == other.shared.state.program.number == before + 1


async def test_a_broken_file_changes_nothing_until_it_is_mended(
    router: LiveRouter, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tercet")
    file.write_text("syntax error(")
    await until(lambda: "mine.py changed and its new content is not used" in caplog.text)
    assert (await router.ask())[1] == [1]
    file.unlink()
    file.write_text(TEXT.format(22))
    await until(lambda: router.service.routing.current.number == 3)
    assert (await router.ask())[1] == [22]


async def test_a_program_that_was_given_up_is_tried_again_when_its_file_changes(router: LiveRouter, file: Path) -> None:
    file.write_text("async def main(request, fleet):\n    raise ValueError\n    yield\n")
    await until(lambda: router.service.routing.current.number == 3)
    for _ in range(3):
        assert (await router.ask())[1] == [100, 101, 102]
    assert (router.service.routing.current.number, await router.ask()) == (2, (f"{file}:main", [1]))
    file.write_text(TEXT.format(5))
    await until(lambda: router.service.routing.current.number == 4)
    assert (await router.ask())[1] == [5]


def test_a_file_that_changes_within_a_second_and_keeps_its_size_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for number in range(5):
        file.write_text(f"async def main(request, fleet, *, number: int = {number}):\n    yield\n")
        program = load_program(f"{file}:main")
        assert program.func.__kwdefaults__ == {"number": number}  # type: ignore[attr-defined]


def test_a_program_may_have_dataclasses_with_postponed_annotations(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n"
        "import dataclasses, typing\n"
        "@dataclasses.dataclass\nclass Window:\n    width: typing.ClassVar[int] = 3\n"
        "async def main(request, fleet, *, window: int = Window.width):\n    yield\n"
    )
    load_program(f"{tmp_path / 'mine.py'}:main", {"window": "4"})


def test_files_of_a_plan() -> None:
    plan = Plan(
        split=(Share(program="a.py:f"), Share(program="a.py:g"), Share(program="balanced")),
        rules=(Rule(program="b.py:f", model="m"),),
    )
    assert files_of(plan) == [Path("a.py"), Path("b.py")]


def test_a_file_that_is_gone_is_no_change(tmp_path: Path) -> None:
    file, watch = tmp_path / "mine.py", FileWatch()
    assert watch.changed([file]) == []
    file.write_text("1")
    assert watch.changed([file]) == []
    file.unlink()
    assert watch.changed([file]) == []
    file.write_text("12")
    assert watch.changed([file]) == [file]
    assert watch.changed([file]) == []


async def test_a_changed_scheduling_file_is_used_and_so_is_a_changed_plugin(
    router: LiveRouter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tercet")
    file, plugin = tmp_path / "scheduling.yaml", tmp_path / "mine.py"
    file.write_text(SCHEDULING.format("first"))
    plugin.write_text(PLUGIN.format(0.5))
    await router.shared.use_scheduling(str(file))
    watching = asyncio.ensure_future(reload_on_change(router.shared, every=0.01))
    await asyncio.sleep(0)
    try:
        file.write_text(SCHEDULING.format("another"))
        await until(lambda: list(router.fleet.scheduling.profiles) == ["another"])
        before = router.fleet.scheduling
        plugin.write_text(PLUGIN.format(0.25))
        await until(lambda: router.fleet.scheduling is not before)
        before = router.fleet.scheduling
        file.write_text("plugins: nonsense")
        await until(lambda: "scheduling.yaml changed and its new content is not used" in caplog.text)
        assert router.fleet.scheduling is before
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
